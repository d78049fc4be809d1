"""What every subject is asked. The shapes are fixed, so that figures of different days and machines can be compared.

    prefill-512    prompts of 512 tokens, one token of answer, one after another
    decode-128     an answer of 128 tokens after a prompt of 128
    decode-2048    an answer of 64 tokens after a prompt of 2048
    copy           answers of 128 tokens that repeat what stands in the prompt
    mixed-16       16 requests at once, prompts of 33 to 500 tokens and answers of 16 to 225
    mixed-64       64 at once; each subject's server runs alone for it, so that memory can be told apart
    startup        from the start of the process to the first token; alone as well

Prompts are sentences of common words, which is all that speed depends on, except for `copy`. A file can bring prompts
of its own, and its requests then take the place of the mixed ones.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....engine.tokenizer import Tokenizer
from ....kernels.errors import UsageError
from ..made import ordinary_tokens, sentences
from ..workload import Item

SEED = 20261129
NAMES = ("prefill-512", "decode-128", "decode-2048", "copy", "mixed-16", "mixed-64", "startup")
ALONE = ("mixed-64", "startup")

# (prompt, answer) tokens of the mixed requests; the first 16 are those of mixed-16.
LENGTHS = (
    (43, 56), (469, 30), (43, 16), (283, 22), (500, 73), (133, 176), (146, 97), (318, 225),
    (187, 192), (442, 132), (206, 62), (35, 88), (33, 16), (279, 211), (149, 114), (125, 158),
    (230, 238), (60, 177), (299, 195), (226, 34), (484, 51), (468, 114), (445, 211), (108, 91),
    (299, 219), (506, 227), (302, 89), (130, 245), (170, 219), (217, 217), (82, 49), (317, 203),
    (374, 31), (369, 71), (118, 58), (284, 183), (164, 58), (201, 208), (95, 121), (136, 61),
    (387, 63), (174, 207), (264, 49), (374, 217), (163, 108), (387, 81), (412, 66), (504, 202),
    (244, 207), (99, 55), (470, 233), (144, 209), (43, 83), (246, 191), (39, 164), (172, 67),
    (120, 30), (252, 174), (328, 88), (202, 199), (288, 164), (240, 86), (219, 161), (271, 221),
)  # fmt: skip

PREFILLS, COPIES = 3, 3
PASSAGE_TOKENS = 120  # repeated in a copy prompt
DECODE_TOKENS, LONG_DECODE_TOKENS, COPY_TOKENS = 128, 64, 128


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests that are sent together: `at_once` of them open at a time.

    kind   which figures count: "prefill", "decode", "mixed" or "startup"
    alone  only one subject's server may run meanwhile
    """

    name: str
    kind: str
    items: tuple[Item, ...]
    at_once: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Prompts:
    """All that can be asked, and the token ids that salts are made of."""

    scenarios: tuple[Scenario, ...]
    pool: tuple[int, ...]
    source: str


def choose(text: str) -> tuple[str, ...]:
    """The comma-separated scenario names in `text`, all for ""; in the order in which they are run."""
    asked = [name for name in (part.strip() for part in text.split(",")) if name]
    for name in asked:
        if name not in NAMES:
            raise UsageError(f"--only has `{name}`", f"choose from: {', '.join(NAMES)}")
    return tuple(name for name in NAMES if not asked or name in asked)


def make_prompts(tokenizer: Tokenizer, names: Sequence[str]) -> Prompts:
    """The scenarios of these names, with prompts made for this tokenizer: the same whenever they are made."""
    rng = random.Random(SEED)
    pool = ordinary_tokens(tokenizer)
    mixed = tuple(Item(_sentences(tokenizer, rng, prompt), answer) for prompt, answer in LENGTHS)
    stretch = _sentences(tokenizer, rng, 2048)
    prefills = tuple(Item(_sentences(tokenizer, rng, 512), 1) for _ in range(PREFILLS))
    copies = tuple(Item(_copy_prompt(tokenizer, rng), COPY_TOKENS) for _ in range(COPIES))
    return Prompts(_scenarios(names, mixed, stretch, prefills, copies), pool, "sentences of common words")


def read_prompts(path: Path, names: Sequence[str]) -> Prompts:
    """The scenarios of these names out of a file: `{"requests": [{"prompt_token_ids": [...], "max_tokens": n}, ...]}`.

    Longer prompts are made by joining those of the file. `copy` needs at least 120 tokens of them.
    """
    try:
        requests = json.loads(path.read_text())["requests"]
        items = tuple(Item(tuple(map(int, one["prompt_token_ids"])), int(one["max_tokens"])) for one in requests)
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {error.strerror}", "check --workload") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"`{path}` is no workload: {type(error).__name__} {error}",
            'it is `{"requests": [{"prompt_token_ids": [...], "max_tokens": n}, ...]}`',
        ) from error
    ids = [token for item in items for token in item.prompt if isinstance(token, int)]
    if not ids or any(not item.prompt or item.max_tokens < 1 for item in items):
        raise UsageError(f"`{path}` has a request without tokens, or none at all", "every request asks for something")
    endless = ids * (-(-8192 // len(ids)))
    prefills = tuple(Item(tuple(endless[512 * i : 512 * (i + 1)]), 1) for i in range(PREFILLS))
    copies = tuple(
        Item(tuple(endless[PASSAGE_TOKENS * i : PASSAGE_TOKENS * (i + 1)] * 2), COPY_TOKENS) for i in range(COPIES)
    )
    pool = tuple(sorted(set(ids)))
    return Prompts(_scenarios(names, items, tuple(endless[:2048]), prefills, copies), pool, str(path))


def _scenarios(
    names: Sequence[str],
    mixed: tuple[Item, ...],
    stretch: tuple[int, ...],
    prefills: tuple[Item, ...],
    copies: tuple[Item, ...],
) -> tuple[Scenario, ...]:
    known = (
        Scenario("prefill-512", "prefill", prefills, 1),
        Scenario("decode-128", "decode", (Item(stretch[:128], DECODE_TOKENS),), 1),
        Scenario("decode-2048", "decode", (Item(stretch, LONG_DECODE_TOKENS),), 1),
        Scenario("copy", "decode", copies, 1),
        Scenario("mixed-16", "mixed", mixed[:16], 16),
        Scenario("mixed-64", "mixed", mixed[:64], 64, alone=True),
        Scenario("startup", "startup", (Item(stretch[:16], 1),), 1, alone=True),
    )
    assert tuple(scenario.name for scenario in known) == NAMES
    return tuple(scenario for scenario in known if scenario.name in names)


def _sentences(tokenizer: Tokenizer, rng: random.Random, tokens: int) -> tuple[int, ...]:
    text = ""
    while True:
        text += (" " if text else "") + sentences(rng, tokens)
        ids = tokenizer.encode(text, add_special=False)
        if len(ids) >= tokens:
            return tuple(ids[:tokens])


def _copy_prompt(tokenizer: Tokenizer, rng: random.Random) -> tuple[int, ...]:
    """A passage twice, and the beginning of a third time: any model goes on with the passage."""
    passage = sentences(rng, PASSAGE_TOKENS)
    return tuple(tokenizer.encode(f"First: {passage}\nAgain: {passage}\nAgain:", add_special=False))
