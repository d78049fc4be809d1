"""What was asked of `llmctl quantize`, checked as far as that goes without looking at the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...kernels.errors import UsageError
from ...quant.scheme import METHODS, Scheme
from .gate import Gate

SAMPLES, SEQLEN, EVAL_TOKENS = 16, 512, 4096
KV_CACHE_SCHEMES = ("none", "fp8")
MOST = 1_000_000  # samples or tokens: more is a slip of the hand, and would never end
MOST_THREADS = 1024  # of an engine, which the result is measured with


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of one run; None and "" mean that nothing was said.

    output        the folder to make; None: a name made of the model's and the scheme's, in the current folder
    calib_*       the text that layers are calibrated on, and how much of it
    eval_*        the text that the result is measured on
    kv_cache_scheme  how the KV cache is stored for which scales are measured: fp8, or none
    fail_if       limits that the result may not exceed
    """

    model: str
    scheme: Scheme
    output: Path | None
    overwrite: bool
    calib_dataset: str
    calib_samples: int | None
    calib_seqlen: int | None
    eval_text: str
    eval_tokens: int | None
    seed: int
    threads: int
    fail_if: tuple[Gate, ...]
    kv_cache_scheme: str = "none"

    def check(self) -> None:
        """Raise UsageError for the first option that cannot work with any model."""
        for name, value, least, most in (
            ("--calib-samples", self.calib_samples, 1, MOST),
            ("--calib-seqlen", self.calib_seqlen, 8, MOST),
            ("--eval-tokens", self.eval_tokens, 2, MOST),
            ("--threads", self.threads, 1, MOST_THREADS),
            ("--seed", self.seed, 0, (1 << 63) - 1),
        ):
            if value is not None and not least <= value <= most:
                raise UsageError(f"{name} is {value}, it must be from {least} to {most}")
        if self.kv_cache_scheme not in KV_CACHE_SCHEMES:
            raise UsageError(
                f"--kv-cache-scheme is `{self.kv_cache_scheme}`", f"choose one of: {', '.join(KV_CACHE_SCHEMES)}"
            )
        if self.scheme.method == "rtn":
            for name, given in (
                ("--calib-dataset", bool(self.calib_dataset)),
                ("--calib-samples", self.calib_samples is not None),
                ("--calib-seqlen", self.calib_seqlen is not None),
            ):
                if given:
                    raise UsageError(
                        f"{name} is given, but rtn reads no calibration text", "use --awq, or leave it out"
                    )


def choose_method(awq: bool, rtn: bool, method: str | None, quantization: str | None) -> str:
    """The one method that these options name, awq if none does; UsageError if they name two."""
    named = [("--awq", "awq")] * awq + [("--rtn", "rtn")] * rtn
    for option, value in (("--method", method), ("--quantization", quantization)):
        if value is not None:
            named.append((option, value.lower()))
            if value.lower() not in METHODS:
                raise UsageError(f"{option} is `{value}`", f"choose one of: {', '.join(METHODS)}")
    if len({value for _, value in named}) > 1:
        (first, one), (second, other) = named[0], next(item for item in named if item[1] != named[0][1])
        raise UsageError(f"{first} says {one} and {second} says {other}", "give one of them")
    return named[0][1] if named else "awq"
