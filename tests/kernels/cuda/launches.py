"""What one step of decoding asks of a GPU, without one: `make launches`.

A driver that only writes down is told all that a made model of 8B would tell a real one, eager and from graphs. Printed
are launches per step and per layer, the copies, and what the host takes for a step: `submit` is laying it out, sending
it and launching it, with what writing down costs (a driver that does nothing takes 2 to 4 us less for each launch), and
`schedule` what the engine takes besides. With `--step` each call of one step follows, with its numbers.
"""

from __future__ import annotations

import itertools
import statistics
import sys

from gpu_check import import_checkout

import_checkout()

import gpu_engine  # noqa: E402

from llmctl.kernels.cuda import devices  # noqa: E402
from llmctl.kernels.cuda.host_driver import HostDriver, Recorded  # noqa: E402

BATCHES, STEPS = (1, 16, 256), 12


def main() -> int:
    print("model            batch  mode   launches  per layer  replays  copies  submit us  schedule us")
    for eager in (True, False):
        show("eager" if eager else "graph", HostDriver(None, (9, 0), processors=132, memory_total=140 << 30))
    return 0


def show(mode: str, host: HostDriver) -> None:
    """Print a line for each model and batch."""
    kept: list[list[Recorded]] = []

    def keep() -> None:
        kept.append(last_step(host.calls))
        host.calls.clear()

    devices.use_driver(host, host.get)
    for row in gpu_engine.speed_rows(
        BATCHES, STEPS, gpu_engine.LARGE.num_layers, enforce_eager=mode == "eager", measuring_ended=keep
    ):
        step = kept[-1]
        launches = sum(call.name == "launch" for call in step)
        replays = sum(call.name == "replay" for call in step)
        copies = sum(call.name in ("upload", "download") for call in step)
        print(
            f"{row['model']:16} {row['batch']:>5}  {mode}  {launches:>8}  {layer_launches(step):>9}  "
            f"{replays:>7}  {copies:>6}  {row['submit_us']:>9}  {row['scheduling_us']:>11}",
            flush=True,
        )
        for call in step if "--step" in sys.argv else ():
            print("   ", call.name, call.kernel, *call.numbers)


def last_step(calls: list[Recorded]) -> list[Recorded]:
    """The calls of the last whole step: what lies between two fetches of tokens."""
    ends = [
        place + 1
        for place, call in enumerate(calls)
        if call.name == "record" and place and calls[place - 1].name == "download"
    ]
    return calls[ends[-2] : ends[-1]]


def layer_launches(step: list[Recorded]) -> int:
    """Launches between one layer's beginning and the next one's, 0 where a graph holds them."""
    begins = [
        place for place, call in enumerate(step) if call.name == "launch" and call.kernel.startswith("rope_store")
    ]
    gaps = [after - before for before, after in itertools.pairwise(begins)]
    return int(statistics.median(gaps)) if gaps else 0


if __name__ == "__main__":
    sys.exit(main())
