"""Whether two models mean the same by a token id, as a draft model and its target must.

Only ids that a tokenizer names are compared. The matrices may be padded to different sizes beyond them.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers

from ...kernels.errors import UnsupportedModel
from .entry import TOKENIZER
from .model import Model


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's name and its `tokenizer.json`."""

    name: str
    tokenizer: bytes

    @classmethod
    def of(cls, model: Model) -> Vocabulary:
        """The vocabulary of a model that is open."""
        return cls(model.name, (model.folder / TOKENIZER).read_bytes())


def check_same_vocabulary(draft: Vocabulary, target: Vocabulary) -> None:
    """UnsupportedModel, with the first difference, if the draft model's tokens are not the target's."""
    if draft.tokenizer == target.tokenizer:
        return
    ours, theirs = _tokens(draft.tokenizer), _tokens(target.tokenizer)
    for index in sorted(ours.keys() | theirs.keys()):
        if (one := ours.get(index)) != (other := theirs.get(index)):
            raise UnsupportedModel(
                f"the draft model `{draft.name}` has another vocabulary than `{target.name}`: "
                f"token {index} is {_shown(one)} and {_shown(other)} "
                f"({len(ours)} and {len(theirs)} tokens)",
                "choose a smaller model of the same family, or use `--speculative-config ngram`",
            )


def _tokens(tokenizer_json: bytes) -> dict[int, str]:
    vocabulary = tokenizers.Tokenizer.from_buffer(tokenizer_json).get_vocab(with_added_tokens=True)
    return {index: token for token, index in vocabulary.items()}


def _shown(token: str | None) -> str:
    return "none" if token is None else repr(token)
