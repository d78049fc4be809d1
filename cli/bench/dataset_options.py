"""Which dataset is asked for and how much of it; light, so that the command line can be read without loading more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...kernels.errors import UsageError

MOST = 1_000_000  # of anything that is counted: more is a slip of the hand, and would never end


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What was asked on the command line; None means: as suits the dataset."""

    dataset: str = "synthetic"
    path: Path | None = None
    num_prompts: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    range_ratio: float = 0.0
    ignore_eos: bool | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a dataset does when nothing is said; `num_prompts` 0 is all there are."""

    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    ignore_eos: bool
    max_concurrency: int


DEFAULTS = {
    "synthetic": Defaults(16, 128, 64, True, 16),
    "random": Defaults(16, 128, 64, True, 16),
    "copy": Defaults(8, 256, 96, True, 1),
    "jsonl": Defaults(0, 0, 128, False, 16),
    "sharegpt": Defaults(32, 0, 0, False, 16),
    "pg19": Defaults(3, 5000, 64, True, 1),
}


def check(options: WorkloadOptions) -> None:
    """Raise UsageError for the first option that contradicts another or cannot work with any model."""
    if options.dataset not in DEFAULTS:
        raise UsageError(f"--dataset is `{options.dataset}`", f"choose one of: {', '.join(DEFAULTS)}")
    needs_path = options.dataset in ("jsonl", "sharegpt")
    if needs_path and options.path is None:
        raise UsageError(f"--dataset {options.dataset} reads a file", "name it with --dataset-path")
    if options.path is not None and not needs_path and options.dataset != "pg19":
        raise UsageError(
            f"--dataset {options.dataset} reads no file", "leave --dataset-path out, or use another dataset"
        )
    if needs_path and (options.prompt_tokens is not None or options.range_ratio):
        raise UsageError(f"the prompts of --dataset {options.dataset} are as long as they are in its file")
    if not 0 <= options.range_ratio < 1:
        raise UsageError(f"--random-range-ratio is {options.range_ratio}, it must be at least 0 and below 1")
    for name, value in (
        ("--num-prompts", options.num_prompts),
        ("--prompt-tokens", options.prompt_tokens),
        ("--output-tokens", options.output_tokens),
    ):
        if value is not None and not 1 <= value <= MOST:
            raise UsageError(f"{name} is {value}, it must be from 1 to {MOST}")
