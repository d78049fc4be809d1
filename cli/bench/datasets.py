"""Datasets by name: each makes a Workload from its options and a seed."""

from __future__ import annotations

from collections.abc import Callable

from ...engine.config import Environment
from ...engine.load.progress import Progress
from .build import Asked, Build
from .dataset_options import DEFAULTS, WorkloadOptions
from .files import jsonl, sharegpt
from .made import copies, pg19, random_ids, synthetic
from .workload import Workload

_BUILDERS: dict[str, Callable[[Build], Workload]] = {
    "synthetic": synthetic,
    "random": random_ids,
    "copy": copies,
    "jsonl": jsonl,
    "sharegpt": sharegpt,
    "pg19": pg19,
}
assert _BUILDERS.keys() == DEFAULTS.keys()


def build(options: WorkloadOptions, asked: Asked, environment: Environment, progress: Progress) -> Workload:
    """The workload that these options describe. Raises UsageError or CapacityError for what cannot work."""
    return _BUILDERS[options.dataset](Build(options, DEFAULTS[options.dataset], asked, environment, progress))
