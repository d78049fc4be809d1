"""The runner of a plan: on the CPU, or on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..device import open_device
from ..load.model import Model
from ..plan import Plan
from .runner import Runner

if TYPE_CHECKING:
    from .cuda_runner import CudaRunner


def make_runner(model: Model, plan: Plan) -> Runner | CudaRunner:
    """A runner with everything in memory. One on a GPU leaves nothing there if that fails."""
    if not plan.on_gpu:
        return Runner(model, plan)
    from .cuda_runner import CudaRunner  # nothing of it is needed on a CPU

    gpu = open_device(plan.device, deterministic=plan.deterministic, jit=plan.jit)
    try:
        return CudaRunner(model, plan, gpu)
    except BaseException:
        gpu.close()
        raise
