"""Datasets whose prompts are made to a length: `synthetic`, `random`, `copy` and `pg19`."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ...engine.tokenizer import Tokenizer
from ...kernels.errors import CapacityError, UsageError
from .build import CHARACTERS_PER_TOKEN, Build
from .longtext import Books, read_books
from .workload import Item, Prompt, Workload

# Short common words: nearly every tokenizer has each of them, with its space, as one token.
WORDS = """
the of and to in is was for on that with as be at by this had from or but an they which you one we all her she
there would their will when who him been has more if no out so what up said its about than into them can only
other time new some could these two may first then do any like my now over such our man me even most made after
also did many must before back see through way where get much go well your know should down work year because
""".split()  # noqa: SIM905, a list would fill the page


def ordinary_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids that stand for text, ascending."""
    ids = range(tokenizer.vocab_size)
    return tuple(i for i in ids if tokenizer.token(i) is not None and not tokenizer.is_special(i))


def synthetic(build: Build) -> Workload:
    """Sentences of common words."""
    items = []
    for prompt, answer in build.lengths():
        text = sentences(build.rng, prompt)
        tokenizer = build.asked.tokenizer
        if tokenizer is None:
            items.append(Item(build.text_as_asked(text), answer))
            continue
        ids = tokenizer.encode(text, add_special=False)
        while len(ids) < prompt:  # a tokenizer that joins words
            text += " " + " ".join(build.rng.choice(WORDS) for _ in range(prompt))
            ids = tokenizer.encode(text, add_special=False)
        items.append(Item(build.as_asked(ids[:prompt]), answer))
    return build.workload("sentences of common words", items)


def sentences(rng: random.Random, count: int) -> str:
    """`count` common words as sentences of twelve."""
    words = [rng.choice(WORDS) for _ in range(count)]
    return " ".join(_sentences(words))


def _sentences(words: list[str]) -> Iterator[str]:
    for start in range(0, len(words), 12):
        part = words[start : start + 12]
        yield part[0].capitalize() + "".join(f" {word}" for word in part[1:]) + "."


def random_ids(build: Build) -> Workload:
    """Random token ids: what a step costs does not depend on what they say."""
    tokenizer = build.asked.tokenizer
    if tokenizer is None or build.asked.chat:
        raise UsageError(
            "--dataset random sends token ids" + (", which a chat endpoint does not take" if build.asked.chat else ""),
            "use --dataset synthetic"
            + ("" if build.asked.chat else ", or name the model with --tokenizer so that its vocabulary is known"),
        )
    pool = ordinary_tokens(tokenizer)
    items = [Item(tuple(build.rng.choices(pool, k=prompt)), answer) for prompt, answer in build.lengths()]
    return build.workload("random token ids", items)


def copies(build: Build) -> Workload:
    """A passage of sentences, and the beginning of the same again: the answer asked for is as long as its rest.

    Even small models go on copying here, so that it shows what drafts can save. Continuing a text is nothing to ask of
    a chat endpoint.
    """
    if build.asked.chat:
        raise UsageError(
            "--dataset copy continues a text, which a chat endpoint does not", "use --endpoint /v1/completions"
        )
    items = []
    for prompt, answer in build.lengths():
        if prompt <= answer:
            raise UsageError(
                f"--dataset copy has its answer in the prompt: {answer} tokens are no part of {prompt}",
                "raise --prompt-tokens above --output-tokens",
            )
        passage = (prompt + answer) // 2
        words = " ".join(_sentences([build.rng.choice(WORDS) for _ in range(passage)])).split(" ")
        if build.asked.tokenizer is None:
            items.append(Item(build.text_as_asked(" ".join(words + words[: prompt - passage])), answer))
            continue
        ids = build.asked.tokenizer.encode(" " + " ".join(words), add_special=False)[:passage]
        items.append(Item(build.as_asked((ids + ids)[:prompt]), answer))
    return build.workload("a passage of common words, begun again", items)


def pg19(build: Build) -> Workload:
    """Stretches of long texts, each from another place. Without a length that was asked for, what the model takes."""
    notes = []
    context = build.asked.context
    if build.options.prompt_tokens is None and context and build.prompt_tokens + build.output_tokens > context:
        build.prompt_tokens = int(context / (1 + build.options.range_ratio)) - build.output_tokens
        if build.prompt_tokens < 1:
            raise CapacityError(f"answers of {build.output_tokens} tokens leave no prompt in the context of {context}")
        notes.append(f"prompts have {build.prompt_tokens} tokens because the model's context is {context}")
    books = read_books(build.options.path, build.environment, build.progress)
    items = []
    for number, (prompt, answer) in enumerate(build.lengths()):
        items.append(Item(_stretch(build, books, number, prompt), answer))
    return build.workload(books.source, items, *notes, stand_in=books.stand_in)


def _stretch(build: Build, books: Books, number: int, tokens: int) -> Prompt:
    """`tokens` tokens from a random paragraph of the text whose turn it is, running on into the next ones.

    No part of a text comes twice; UsageError if all of them together are shorter.
    """
    wanted = tokens * CHARACTERS_PER_TOKEN
    book = number % len(books.texts)
    text = books.texts[book]
    start = build.rng.randrange(max(1, len(text) - wanted))
    start = max(0, text.find("\n\n", start, len(text) - wanted)) or start
    tokenizer = build.asked.tokenizer
    parts = _once_around(books.texts, book, start)
    piece, size = next(parts), wanted
    while True:
        while len(piece) < size and (part := next(parts, None)) is not None:
            piece += "\n\n" + part
        if tokenizer is None:
            if len(piece) >= wanted:
                return build.text_as_asked(piece[:wanted])
            raise _too_short(build, books, f"about {len(piece) // CHARACTERS_PER_TOKEN}", tokens)
        ids = tokenizer.encode(piece[:size], add_special=not build.asked.chat)
        if len(ids) >= tokens:
            return build.as_asked(ids[:tokens])
        if len(piece) < size:
            raise _too_short(build, books, str(len(ids)), tokens)
        size *= 2


def _once_around(texts: tuple[str, ...], book: int, start: int) -> Iterator[str]:
    """All texts from a place in one of them on, and at last what is before that place."""
    yield texts[book][start:].lstrip()
    yield from texts[book + 1 :]
    yield from texts[:book]
    if start:
        yield texts[book][:start]


def _too_short(build: Build, books: Books, held: str, tokens: int) -> UsageError:
    path = build.options.path
    texts = f"the texts in `{path}` hold" if path is not None else f"{books.source} holds"
    return UsageError(f"{texts} {held} tokens, {tokens} are needed", "lower --prompt-tokens, or give longer texts with "
                      "--dataset-path")  # fmt: skip
