"""Golden logits: what a quantized checkpoint gave for a few tokens when it was measured, kept in its quality card.

An engine that loads it computes them again before it serves. Files that are whole and still not those that were
measured, and a machine that computes something else, show there and nowhere else.
"""

from __future__ import annotations

import msgspec

from ...kernels.errors import CheckpointError
from ...quant.card import CARD_NAME
from .hub import Source

KEY = "golden"  # of the card


class Golden(msgspec.Struct, frozen=True, kw_only=True):
    """After each of `tokens`, the likeliest next ones (`ids`, best first) and their `logits`.

    `fingerprint` is that of the plan by which they were computed: under the same one the bits are the same.
    """

    tokens: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...]
    logits: tuple[tuple[float, ...], ...]
    fingerprint: str


def read_golden(source: Source) -> Golden | None:
    """What the source's card holds; None without a card, or if the card has none. CheckpointError for a broken one."""
    path = source.path / CARD_NAME
    if source.kind != "hf" or not path.is_file():
        return None
    try:
        golden = msgspec.json.decode(path.read_bytes(), type=_Card).golden
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"`{path}` is no quality card: {error}", "quantize again, or remove the card") from error
    if golden is None:
        return None
    lengths = {len(golden.tokens), len(golden.ids), len(golden.logits)}
    if lengths == {0} or len(lengths) > 1 or any(map(_unlike, golden.ids, golden.logits)):
        raise CheckpointError(
            f"the golden logits in `{path}` are of {len(golden.tokens)} tokens, {len(golden.ids)} lists of ids and "
            f"{len(golden.logits)} of logits",
            "quantize again, or remove the card",
        )
    return golden


def _unlike(ids: tuple[int, ...], logits: tuple[float, ...]) -> bool:
    return len(ids) != len(logits) or not ids


class _Card(msgspec.Struct):
    golden: Golden | None = None
