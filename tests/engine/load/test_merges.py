"""The merges of a packed tokenizer.json are strings where they can be, and mean what they meant."""

import json

import tokenizers
from tokenizers import pre_tokenizers, trainers
from tokenizers.models import BPE, WordLevel

from llmctl.engine.load.merges import with_short_merges

TEXT = ["the cat sat on the mat with the other cat", "a hat that the cat had"]


def trained(whole_text: bool = False) -> str:
    """Merges of words of bytes, or of text with its spaces."""
    tokenizer = tokenizers.Tokenizer(BPE())
    if not whole_text:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=60, special_tokens=["<end>"]))
    return tokenizer.to_str()


def test_merges_become_strings_and_the_library_understands_the_same():
    before = trained()
    assert isinstance(json.loads(before)["model"]["merges"][0], list)
    after = with_short_merges(before)
    assert all(isinstance(merge, str) for merge in json.loads(after)["model"]["merges"])
    assert tokenizers.Tokenizer.from_str(after).to_str() == tokenizers.Tokenizer.from_str(before).to_str()
    assert with_short_merges(after) == after


def test_merges_of_tokens_with_spaces_stay_pairs():
    before = trained(whole_text=True)
    assert any(" " in part for merge in json.loads(before)["model"]["merges"] for part in merge)
    assert with_short_merges(before) == before


def test_a_tokenizer_without_merges_stays_as_it_is():
    before = tokenizers.Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str()
    assert with_short_merges(before) == before
