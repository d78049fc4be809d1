"""`RopeScaling`: another rotary embedding than the model's own, as a user asks for it.

The names are those of `rope_scaling` and `rope_parameters` in a `config.json`, so that what a model's card says to
write there can be given on the command line instead.
"""

from __future__ import annotations

import difflib
import math

import msgspec

from ..kernels.errors import UsageError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_WRAPPERS = ("rope_scaling", "rope_parameters")
EXAMPLE = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}'
# What each type is made of, besides `rope_theta` and `original_max_position_embeddings`; the first are required.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (("factor",), ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "longrope": (("factor", "short_factor", "long_factor"), ("attention_factor",)),
}


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rope parameters. 0, None and () mean: not given.

    rope_theta                        the model's own if not given
    original_max_position_embeddings  positions that the model was trained on: its context if not given
    """

    rope_type: str
    rope_theta: float = 0.0
    factor: float = 0.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool | None = None
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def read(cls, given: object) -> RopeScaling:
        """The checked scaling in a mapping, as JSON has it; UsageError for what it cannot be.

        The mapping may stand under `rope_scaling` or `rope_parameters`, as in a config, with `rope_theta` beside it.
        """
        given = _object("--rope-scaling", given)
        inner = [name for name in _WRAPPERS if name in given]
        if inner:
            others = sorted(set(given) - {*_WRAPPERS, "rope_theta"})
            if others or len(inner) > 1:
                named = ", ".join(f"`{name}`" for name in (*others, *(inner if len(inner) > 1 else ())))
                raise UsageError(
                    f"--hf-overrides names {named}", "it takes `rope_scaling` or `rope_parameters`, and `rope_theta`"
                )
            beside = {"rope_theta": given["rope_theta"]} if "rope_theta" in given else {}
            given = beside | _object(f"`{inner[0]}`", given[inner[0]])
        if "type" in given and "rope_type" not in given:  # as older configs have it
            given = {"rope_type": given["type"], **{key: value for key, value in given.items() if key != "type"}}
        known = cls.__struct_fields__
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean `{near[0]}`?" if near else f"it has: {', '.join(known)}"
                raise UsageError(f"--rope-scaling has no key `{name}`", hint)
        try:
            scaling = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"--rope-scaling cannot be {given!r}: {error}", f"write it as '{EXAMPLE}'") from error
        scaling.check()
        return scaling

    def __str__(self) -> str:
        """As it is written on the command line."""
        return msgspec.json.encode(self.given()).decode()

    def given(self) -> dict[str, object]:
        """What was given, as a config has it."""
        values = msgspec.structs.asdict(self).items()
        kept = {key: value for key, value in values if value is False or value not in (None, 0, ())}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}

    def check(self) -> None:
        """Raise UsageError for the first value that cannot work for any model."""
        if self.rope_type not in _KEYS:
            raise UsageError(
                f"the rope_type of --rope-scaling is `{self.rope_type}`", f"choose one of: {', '.join(ROPE_TYPES)}"
            )
        required, optional = _KEYS[self.rope_type]
        usable = ("rope_type", "rope_theta", "original_max_position_embeddings", *required, *optional)
        for name, value in msgspec.structs.asdict(self).items():
            given = value is False or value not in (None, 0, ())
            if name in required and not given:
                raise UsageError(
                    f"--rope-scaling of type {self.rope_type} lacks `{name}`", f"add it, as in '{EXAMPLE}'"
                )
            if given and name not in usable:
                raise UsageError(f"`{name}` has no meaning for --rope-scaling of type {self.rope_type}", "leave it out")
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise UsageError(f"`{name}` of --rope-scaling is {value:g}, it must be above 0 and finite")
        if self.factor and not 1 <= self.factor <= 4096:
            raise UsageError(f"`factor` of --rope-scaling is {self.factor:g}, it must be from 1 to 4096")


def _object(name: str, given: object) -> dict[str, object]:
    if not isinstance(given, dict):
        raise UsageError(f"{name} is {given!r}, it must be a JSON object", f"such as '{EXAMPLE}'")
    return given
