"""Flags of other servers that have no meaning here, and why: a user who types one is told, it is never ignored.

The same names are refused in a configuration file.
"""

from __future__ import annotations

_FIXED_FORMAT = "a checkpoint is run in the format that its files are in; `llmctl quantize` makes others"
_NO_ADAPTERS = "adapters are not supported"
_NO_TOOLS = "tools are not supported"

_REASONS = {
    "cpu-offload-gb": "weights are in this machine's memory already",
    "quantization": _FIXED_FORMAT,
    "load-format": _FIXED_FORMAT,
    "enforce-eager": "nothing is compiled or captured on a CPU",
    "download-dir": "models are kept where LLMCTL_CACHE says",
    "kv-cache-dtype-skip-layers": "all layers store K and V in one format; set it with `--kv-cache-dtype`",
    "enable-lora": _NO_ADAPTERS,
    "lora-modules": _NO_ADAPTERS,
    "max-loras": _NO_ADAPTERS,
    "max-lora-rank": _NO_ADAPTERS,
    "enable-auto-tool-choice": _NO_TOOLS,
    "tool-call-parser": _NO_TOOLS,
    "reasoning-parser": "reasoning is not told apart from the answer",
    "structured-outputs-config": "structured output is not supported",
    "max-logprobs": "every request may ask for up to 20",
    "chat-template-kwargs": "requests give their own, as `chat_template_kwargs`",
}


def why_not(name: str) -> str:
    """Why the option of this name, with or without dashes in front, does not exist here; "" if nothing is known."""
    return _REASONS.get(name.lstrip("-").replace("_", "-"), "")
