"""A `tokenizer.json` and what chat needs, built from the metadata of a GGUF file.

GGUF stores the vocabulary, but names the splitting of text into words only by a short label (`tokenizer.ggml.pre`).
An unknown label is refused: a near enough rule would give near enough token ids, and nobody would notice.
Files without a label predate it and are taken as GPT-2, the rule that such models were converted with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ...kernels.errors import CheckpointError, UnsupportedModel
from .gguf import GGUFFile
from .gguf_model import int_value, text_value

Item = TypeVar("Item", str, int, float)

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """`json` is a whole tokenizer.json; special tokens by their role (`bos_token`, `eos_token`, ...)."""

    json: str
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...]
    chat_template: str


@dataclass(frozen=True, slots=True)
class _Split:
    """How text becomes words: steps before the byte-level BPE, and how its vocabulary is used."""

    steps: Callable[[], list[pre_tokenizers.PreTokenizer]]
    byte_regex: bool  # the GPT-2 rule, which is part of ByteLevel
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is taken as it is, without merges
    bos: bool = False


def _regex_step(pattern: str) -> Callable[[], list[pre_tokenizers.PreTokenizer]]:
    return lambda: [pre_tokenizers.Split(Regex(pattern), "isolated")]


_GPT2 = _Split(list, byte_regex=True)
_DIGITS = _Split(lambda: [pre_tokenizers.Digits(individual_digits=True)], byte_regex=True)
_QWEN2 = _Split(_regex_step(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS_AND_SPACE}"), byte_regex=False, nfc=True)
_LLAMA3 = _Split(
    _regex_step(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACE}"),
    byte_regex=False,
    whole_words=True,
    bos=True,
)
_SPLITS = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]

    def of_type(self, kind: int) -> Iterator[tuple[int, str]]:
        return ((index, token) for index, token in enumerate(self.tokens) if self.types[index] == kind)


def build_tokenizer(gguf: GGUFFile) -> GGUFTokenizer:
    """The file's tokenizer; UnsupportedModel for a kind or a pre-tokenizer that is not known here."""
    kind = text_value(gguf, "tokenizer.ggml.model")
    if kind is None:
        raise CheckpointError(f"`{gguf.path}` has no tokenizer", "use a GGUF file with `tokenizer.ggml` metadata")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"`{gguf.path}` has tokenizer model `{kind}`", "supported: gpt2, llama")
    vocabulary = _vocabulary(gguf)
    if kind == "gpt2":
        label = text_value(gguf, "tokenizer.ggml.pre") or "default"
        split = _SPLITS.get(label)
        if split is None:
            raise UnsupportedModel(f"`{gguf.path}` has pre-tokenizer `{label}`", f"supported: {', '.join(_SPLITS)}")
        tokenizer, bos_default = _byte_level(gguf, vocabulary, split), split.bos
    else:
        tokenizer, bos_default = _sentence_piece(gguf, vocabulary), True
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for _, token in vocabulary.of_type(_CONTROL)]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for _, token in vocabulary.of_type(_USER_DEFINED)]
    )
    special = _special_tokens(gguf, vocabulary.tokens)
    tokenizer.post_processor = _template(gguf, special, vocabulary.tokens, bos_default)
    return GGUFTokenizer(
        tokenizer.to_str(),
        special,
        _eos_ids(gguf, vocabulary),
        text_value(gguf, "tokenizer.chat_template") or "",
    )


def _vocabulary(gguf: GGUFFile) -> _Vocabulary:
    tokens = _list(gguf, "tokenizer.ggml.tokens", str)
    types = _list(gguf, "tokenizer.ggml.token_type", int) or [1] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise CheckpointError(f"`{gguf.path}` has {len(tokens)} tokens and {len(types)} token types")
    return _Vocabulary(tokens, types)


def _byte_level(gguf: GGUFFile, vocabulary: _Vocabulary, split: _Split) -> Tokenizer:
    merges = []
    for merge in _list(gguf, "tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(f"`{gguf.path}` has merge {merge!r}, expected two parts with one space between")
        merges.append((left, right))
    tokenizer = Tokenizer(_bpe(gguf, vocabulary, merges, split.whole_words, None))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.byte_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split.steps(), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(gguf: GGUFFile, vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE: the pair that makes the token of the highest score is merged first."""
    scores = _list(gguf, "tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(f"`{gguf.path}` has {len(vocabulary.tokens)} tokens and {len(scores)} token scores")
    if sum(1 for _ in vocabulary.of_type(_BYTE)) not in (0, 256):
        raise CheckpointError(f"`{gguf.path}` has some byte tokens, but not all 256")
    unknown = next((token for _, token in vocabulary.of_type(_UNKNOWN)), None)
    merges = _merges_by_score(vocabulary, scores)
    tokenizer = Tokenizer(_bpe(gguf, vocabulary, merges, False, unknown))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    strip: list[decoders.Decoder] = []
    if gguf.metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        strip.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first, then in order of the parts' ids."""
    mergeable = {
        token: index
        for index, token in enumerate(vocabulary.tokens)
        if vocabulary.types[index] not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    }
    ranked = []
    for token, index in mergeable.items():
        for cut in range(1, len(token)):
            left, right = mergeable.get(token[:cut]), mergeable.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], left, right))
    ranked.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in ranked]


def _bpe(
    gguf: GGUFFile, vocabulary: _Vocabulary, merges: list[tuple[str, str]], whole_words: bool, unknown: str | None
) -> models.BPE:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        raise CheckpointError(f"`{gguf.path}` has {len(vocabulary.tokens) - len(ids)} tokens that occur twice")
    byte_fallback = any(kind == _BYTE for kind in vocabulary.types)
    try:
        return models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=unknown,
            fuse_unk=unknown is not None,
            byte_fallback=byte_fallback,
            ignore_merges=whole_words,
        )
    except Exception as error:  # the library raises bare Exception; all it checks is that merges are in the vocabulary
        raise CheckpointError(f"the tokenizer in `{gguf.path}` does not hold together: {error}") from error


def _special_tokens(gguf: GGUFFile, tokens: list[str]) -> dict[str, str]:
    special = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"), ("sep", "seperator")):
        index = _token_id(gguf, f"tokenizer.ggml.{key}_token_id", len(tokens))
        if index is not None:
            special[f"{role}_token"] = tokens[index]
    return special


def _template(
    gguf: GGUFFile, special: Mapping[str, str], tokens: list[str], bos_default: bool
) -> processors.TemplateProcessing:
    """Which special tokens `encode` puts round a text."""
    around: dict[str, str] = {}
    for role, default in (("bos", bos_default), ("eos", False)):
        wanted = gguf.metadata.get(f"tokenizer.ggml.add_{role}_token", default)
        token = special.get(f"{role}_token")
        if wanted and token is None:
            raise CheckpointError(f"`{gguf.path}` wants a {role} token in front or behind, but names none")
        if wanted and token is not None:
            around[role] = token
    single = [*([around["bos"]] if "bos" in around else []), "$A", *([around["eos"]] if "eos" in around else [])]
    return processors.TemplateProcessing(
        single=single, special_tokens=[(token, tokens.index(token)) for token in sorted(set(around.values()))]
    )


def _eos_ids(gguf: GGUFFile, vocabulary: _Vocabulary) -> tuple[int, ...]:
    """Ids that end a sequence: those named, and control tokens that are known to end a turn."""
    ids = []
    for key in ("eos", "eot", "eom"):
        index = _token_id(gguf, f"tokenizer.ggml.{key}_token_id", len(vocabulary.tokens))
        if index is not None:
            ids.append(index)
    ids.extend(index for index, token in vocabulary.of_type(_CONTROL) if token in _END_OF_TURN)
    return tuple(dict.fromkeys(ids))


def _token_id(gguf: GGUFFile, key: str, size: int) -> int | None:
    index = int_value(gguf, key)
    if index is not None and not 0 <= index < size:
        raise CheckpointError(f"`{key}` in `{gguf.path}` is {index}, the vocabulary has {size} tokens")
    return index


def _list(gguf: GGUFFile, key: str, kind: type[Item]) -> list[Item]:
    """The array under `key`, empty if absent."""
    value = gguf.metadata.get(key, [])
    if not isinstance(value, list):
        raise CheckpointError(f"`{key}` in `{gguf.path}` is no array")
    items = [item for item in value if isinstance(item, kind)]
    if len(items) != len(value):
        raise CheckpointError(f"`{key}` in `{gguf.path}` is no array of {kind.__name__}")
    return items
