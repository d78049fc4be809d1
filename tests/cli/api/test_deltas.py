"""Silence is told after as long as it was asked for, whatever came before, in a loop whose time is virtual."""

import asyncio
import types

from llmctl.cli.api.deltas import Mailbox, opened
from tests.cli.bench.virtual import run


class Generation:
    finished = False

    def take(self, output):
        return types.SimpleNamespace(text=output, finish=None)

    def close(self):
        self.finished = True


class Frontend:
    """Hands its outputs over at given times, through the callback that the client's thread would call."""

    def __init__(self, *timed):
        self.timed, self.generation = timed, Generation()

    def open(self, request, carry):
        for when, text in self.timed:
            asyncio.get_running_loop().call_later(when, carry, text)
        return self.generation


def heard(timed, until_s, patience_s=15.0, busy_s=0.0):
    """[(second, text or None for a silence)] until then; the reader is busy for so long after each text."""

    async def main():
        loop = asyncio.get_running_loop()
        start, found = loop.time(), []
        frontend = Frontend(*timed)
        with opened(frontend, Mailbox(), ["request"]) as deltas:
            while loop.time() - start < until_s:
                items = await deltas.next(patience_s)
                now = round(loop.time() - start, 3)
                found += [(now, delta.text) for _, delta in items] or [(now, None)]
                if items:
                    await asyncio.sleep(busy_s)
        assert frontend.generation.finished
        return found

    return run(main())


def test_silence_is_told_again_and_again_and_never_while_texts_come():
    assert heard([], 40) == [(15, None), (30, None), (45, None)]
    texts = [(float(second), str(second)) for second in range(1, 31)]
    assert heard(texts, 40) == [*texts, (45.0, None)]


def test_silence_counts_from_the_last_text():
    assert heard([(10, "a")], 20) == [(10, "a"), (25, None)]


def test_a_reader_that_is_busy_hears_of_no_silence():
    assert heard([(1, "a"), (2, "b")], 50, busy_s=20.0) == [(1, "a"), (21, "b"), (56, None)]
