"""llmctl: one engine to quantize, serve, bench and chat with a language model.

`LLM`, `SamplingParams` and `BeamSearchParams` are handed on lazily, so that `import llmctl` (and every
`llmctl --help`) stays instant.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as `typing` says it, whose import takes longer than everything else here

if TYPE_CHECKING:
    from .engine.beam_records import BeamSearchParams
    from .engine.llm import LLM
    from .engine.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "BeamSearchParams", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from .engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from .engine.request import SamplingParams

        return SamplingParams
    if name == "BeamSearchParams":
        from .engine.beam_records import BeamSearchParams

        return BeamSearchParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
