"""Tokenizers built from GGUF metadata give the ids of the tokenizer the metadata was made from."""

import json

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from llmctl.kernels.errors import CheckpointError, UnsupportedModel
from llmctl.quant.formats.gguf import open_gguf
from llmctl.quant.formats.gguf_tokenizer import build_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, it's 12345 times.",
    "def f(x):\n    return x ** 2  # squares\r\n\r\n\tif y != 3.14:",
    "Grüße aus Köln! 你好，世界。 Привет 🙂🙃 e\u0301t\u00e9",
    "we'll  they're I'D DON'T   spaces\n\n\n and 2024-01-02 ½ ٣٤",
]
TEXTS = [*CORPUS, "<|im_start|>user\nhi<|im_end|>", "", " ", "\u00a0x\u3000y", "a<tool>b", "𝔘𝔫𝔦 ✨ 1234567"]
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(label):
    """A tokenizer with the pre-tokenizer that models with this label have on the hub."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=label == "llama-bpe"))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=label in ("smollm", "gpt-2"))
    digits = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}
    steps = []
    if label == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    elif label in digits:
        rule = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits[label]}|{TAIL}"
        steps = [pre_tokenizers.Split(Regex(rule), "isolated")]
    if label == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def write(path, keys):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"tokenizer.{key}", value)
    writer.add_tensor("w", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


def byte_level_keys(tokenizer, label):
    state = json.loads(tokenizer.to_str())
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    added = tokenizer.get_added_tokens_decoder()
    types = [1 if i not in added else 3 if added[i].special else 4 for i in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": label,
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": merges,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.add_bos_token": False,
        "chat_template": "{{ messages }}",
    }


@pytest.mark.parametrize("label", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
def test_byte_level_ids_are_those_of_the_original(tmp_path, label):
    original = byte_level(label)
    built = build_tokenizer(write(tmp_path / "x.gguf", byte_level_keys(original, label)))
    rebuilt = Tokenizer.from_str(built.json)
    for text in TEXTS:
        ids = original.encode(text).ids
        assert rebuilt.encode(text).ids == ids, text
        for skip in (False, True):
            assert rebuilt.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)


def test_the_rest_of_the_metadata_is_read(tmp_path):
    keys = byte_level_keys(byte_level("smollm"), "smollm") | {"ggml.eot_token_id": 0}
    built = build_tokenizer(write(tmp_path / "x.gguf", keys))
    assert built.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert built.eos_ids == (2, 0)
    assert built.chat_template == "{{ messages }}"


def test_bos_and_eos_are_added_as_the_metadata_asks(tmp_path):
    keys = byte_level_keys(byte_level("gpt-2"), "gpt-2") | {"ggml.add_bos_token": True, "ggml.add_eos_token": True}
    tokenizer = Tokenizer.from_str(build_tokenizer(write(tmp_path / "x.gguf", keys)).json)
    plain = tokenizer.encode("hello", add_special_tokens=False).ids
    assert tokenizer.encode("hello").ids == [1, *plain, 2]


def test_llama3_files_add_bos_unless_they_say_no(tmp_path):
    keys = byte_level_keys(byte_level("llama-bpe"), "llama-bpe")
    del keys["ggml.add_bos_token"]
    tokenizer = Tokenizer.from_str(build_tokenizer(write(tmp_path / "x.gguf", keys)).json)
    assert tokenizer.encode("hello").ids[0] == 1


def sentence_piece_keys():
    """SentencePiece BPE vocabulary: control, bytes, then pieces with scores that fall with the id."""
    pieces = ["\u2581", *"ethaonldwrs,.", "el", "ll", "lo", "\u2581h", "\u2581hel", "\u2581hell", "\u2581hello"]
    pieces += ["\u2581w", "or", "ld", "\u2581wor", "\u2581world", "th", "\u2581th", "\u2581the"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "[INST]"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    scores = [0.0, 0.0, 0.0, *[0.0] * 256, *(-float(i) for i in range(len(pieces))), 0.0]
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.scores": scores,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }


def merged_by_score(text, tokens, scores):
    """SentencePiece's own algorithm, one merge at a time: best score first, leftmost on a tie."""
    ids = {token: i for i, token in enumerate(tokens)}
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        best = None
        for i in range(len(parts) - 1):
            index = ids.get(parts[i] + parts[i + 1])
            if index is not None and (best is None or scores[index] > best[0]):
                best = (scores[index], i)
        if best is None:
            break
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
    result = []
    for part in parts:
        result.extend([ids[part]] if part in ids else [3 + byte for byte in part.encode()])
    return result


def test_sentence_piece_ids_follow_the_scores(tmp_path):
    keys = sentence_piece_keys()
    tokenizer = Tokenizer.from_str(build_tokenizer(write(tmp_path / "x.gguf", keys)).json)
    for text in ("hello world", "the hello, hell", "hé 你", "lllo oorld", "a\nb"):
        expected = merged_by_score(text, keys["ggml.tokens"], keys["ggml.scores"])
        assert tokenizer.encode(text).ids == [1, *expected], text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("a[INST]").tokens[-1] == "[INST]"


def test_an_unknown_pre_tokenizer_lists_those_known(tmp_path):
    keys = byte_level_keys(byte_level("smollm"), "smollm") | {"ggml.pre": "mystery"}
    with pytest.raises(UnsupportedModel, match="pre-tokenizer `mystery`") as caught:
        build_tokenizer(write(tmp_path / "x.gguf", keys))
    assert "smollm" in caught.value.hint and "qwen2" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.token_type": [1, 1]}, "2 token types"),
        ({"ggml.merges": ["a"]}, "merge 'a'"),
        ({"ggml.merges": ["nonsense words"]}, "does not hold together"),
        ({"ggml.eos_token_id": 100_000}, "eos_token_id.*100000"),
        ({"ggml.tokens": 5}, "no array"),
        ({"ggml.tokens": [1, 2]}, "no array of str"),
    ],
)
def test_a_broken_tokenizer_is_an_error(tmp_path, change, message):
    keys = byte_level_keys(byte_level("smollm"), "smollm") | change
    with pytest.raises(CheckpointError, match=message):
        build_tokenizer(write(tmp_path / "x.gguf", keys))


def test_a_file_without_tokenizer_or_with_another_kind_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer"):
        build_tokenizer(write(tmp_path / "x.gguf", {}))
    with pytest.raises(UnsupportedModel, match="`bert`"):
        build_tokenizer(write(tmp_path / "y.gguf", {"ggml.model": "bert"}))
