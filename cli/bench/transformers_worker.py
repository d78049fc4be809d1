"""`python -m llmctl.cli.bench.transformers_worker PATH KIND NAME THREADS`: transformers in a process of its own.

So its memory can be told from ours and its threads do not spin beside ours. It reads requests from stdin as lines of
JSON and writes what happened to stdout. Requests that are waiting when a batch ends become the next one: a static,
left-padded batch that runs until its longest answer is done, which is how transformers serves several prompts at once.
"""

from __future__ import annotations

import inspect
import os
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ...engine.load.hub import Source

QUIET_S = 0.02  # a batch starts when no request has come for so long


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Generate `max_tokens` tokens greedily, fewer if one of `stop_ids` comes."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for this request any more."""

    id: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The model is ready."""


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """One more token for each of these requests, `tokens` in their order; those in `done` are complete with it."""

    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    done: tuple[int, ...] = ()


Told = Ask | Cancel
Happened = Loaded | Tokens


def main(path: str, kind: str, name: str, threads: int) -> None:
    """Load, then serve until stdin ends."""
    channel = os.fdopen(os.dup(1), "wb")  # libraries that print must not print into it
    os.dup2(2, 1)
    from .peers import load_transformers

    import torch  # isort: skip

    torch.set_num_threads(threads)
    model = load_transformers(Source(Path(path), kind, name))
    told: queue.SimpleQueue[Told | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, told), daemon=True).start()
    _write(channel, Loaded())
    waiting: list[Ask] = []
    while True:
        if not _gather(told, waiting):
            return
        batch, waiting = waiting, []
        with torch.inference_mode():
            for happened in generate(model, batch):
                _write(channel, happened)
                _drain(told, waiting, batch)


def generate(model: Any, batch: list[Ask]) -> Iterator[Tokens]:
    """Greedy tokens for all of the batch, step by step, until the last one is complete.

    A request that is taken out of `batch` meanwhile is computed on, as a static batch does, but not waited for.
    """
    import torch
    from transformers import DynamicCache

    asks = list(batch)
    width = max(len(ask.prompt) for ask in asks)
    ids = torch.zeros(len(asks), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, ask in enumerate(asks):
        ids[row, width - len(ask.prompt) :] = torch.tensor(ask.prompt)
        mask[row, width - len(ask.prompt) :] = 1
    padded = bool((mask == 0).any())
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, step = DynamicCache(config=model.config), 0  # the model appends to it
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    open_ids = {ask.id for ask in asks}
    while open_ids & {ask.id for ask in batch}:
        out = model(
            ids,
            attention_mask=mask if padded else None,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{cache_name: cache},
        )
        step += 1
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(asks), 1)], -1)
        sampled = ids[:, 0].tolist()
        running = [(ask, token) for ask, token in zip(asks, sampled, strict=True) if ask.id in open_ids]
        done = tuple(ask.id for ask, token in running if step == ask.max_tokens or token in ask.stop_ids)
        open_ids.difference_update(done)
        yield Tokens(tuple(ask.id for ask, _ in running), tuple(token for _, token in running), done)


def _gather(told: queue.SimpleQueue[Told | None], waiting: list[Ask]) -> bool:
    """Wait until there is a request and no more come; False when there will be none."""
    while True:
        try:
            message = told.get(timeout=QUIET_S) if waiting else told.get()
        except queue.Empty:
            return True
        if message is None:
            return False
        _note(message, waiting, [])


def _drain(told: queue.SimpleQueue[Told | None], waiting: list[Ask], batch: list[Ask]) -> None:
    while not told.empty():
        message = told.get()
        if message is None:
            sys.exit()
        _note(message, waiting, batch)


def _note(message: Told, waiting: list[Ask], batch: list[Ask]) -> None:
    if isinstance(message, Ask):
        waiting.append(message)
        return
    for asks in (waiting, batch):
        asks[:] = [ask for ask in asks if ask.id != message.id]


def _read(stream: BinaryIO, told: queue.SimpleQueue[Told | None]) -> None:
    decoder: msgspec.json.Decoder[Told] = msgspec.json.Decoder(Told)
    for line in stream:
        told.put(decoder.decode(line))
    told.put(None)


def _write(channel: BinaryIO, happened: Happened) -> None:
    channel.write(msgspec.json.encode(happened) + b"\n")
    channel.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
