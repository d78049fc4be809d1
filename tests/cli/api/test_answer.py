"""Streams that are silent for long, and errors before and after a stream has begun."""

import asyncio
import json

from llmctl.cli.api.admission import Place
from llmctl.cli.api.answer import Answer, EventStream, Job
from llmctl.cli.api.chat_shape import ChatShape
from llmctl.cli.api.errors import ApiError
from llmctl.cli.api.journal import Record
from llmctl.cli.api.service import Service
from llmctl.cli.api.settings import ServeSettings
from llmctl.cli.api.shape import Heading, Piece, Tally
from llmctl.engine.frontend import TextDelta, Usage
from llmctl.engine.request import FinishReason, Request, SamplingParams


class Script:
    """Deltas from a list; None stands for a silence."""

    def __init__(self, *items):
        self._items = list(items)

    @property
    def finished(self):
        return not self._items

    async def next(self, patience_s):
        item = self._items.pop(0)
        if isinstance(item, Exception):
            raise item
        return [] if item is None else [(0, item)]


REQUEST = Request(id="id-0", prompt=(1,), sampling=SamplingParams(), seed=0, stop_ids=(), max_tokens=4)


def run(*items):
    """The ASGI messages of a stream that gets these deltas."""
    sent = []

    async def send(message):
        sent.append(message)

    service = Service(ServeSettings(names=("tiny",)), 1)
    shape = ChatShape(Heading("chatcmpl-id", 0, "tiny", "fp"), None, False, None, None)
    job = Job(1, 1, lambda _: [REQUEST], lambda *_: shape, True, False, False, "messages")
    answer, events = Answer(job, service, Record(service.metrics, "id")), EventStream(send)

    async def drive():
        try:
            await answer._stream(Script(*items), shape, Place(1, 1), Tally([REQUEST]), events)
        except ApiError as error:
            assert events.begun
            await events.fail(error)

    asyncio.run(drive())
    return sent


HELLO = TextDelta(0, "hello", (5,))
END = TextDelta(0, "", finish=FinishReason.STOP, usage=Usage(1, 1, 0))


def bodies(sent):
    return b"".join(message["body"] for message in sent[1:]).decode().split("\n\n")


def test_a_silent_stream_begins_and_is_kept_alive():
    sent = run(None, None, HELLO, END)
    assert sent[0]["type"] == "http.response.start" and sent[0]["status"] == 200
    assert bodies(sent)[:2] == [": ping", ": ping"]
    assert bodies(sent)[-2:] == ["data: [DONE]", ""]
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]


def test_text_that_is_held_back_makes_no_empty_chunk():
    held = TextDelta(0, "", (6,))
    texts = [json.loads(body.removeprefix("data: "))["choices"][0]["delta"].get("content")
             for body in bodies(run(held, held, HELLO, END)) if body.startswith("data: {")]  # fmt: skip
    assert texts == ["", "hello", None]


def test_an_error_after_the_first_chunk_ends_the_stream_without_done():
    events = bodies(run(HELLO, ApiError(503, "gone", code="engine_dead")))
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert "[DONE]" not in "".join(events)


def test_a_piece_of_text_alone_is_written_as_the_whole_chunk_would_be():
    heading = Heading("chatcmpl-id", 0, 'a "content":"" \\ model', "fp")
    plain, full = ChatShape(heading, None, False, None, None), ChatShape(heading, None, False, None, (1,))
    for choice, text in ((0, 'so "much" \\ ü\n'), (3, ""), (0, "again")):
        piece = Piece(text, (5,), ())
        expected = json.loads(full.piece(choice, piece))
        assert expected["choices"][0].pop("token_ids") == [5]
        assert json.loads(plain.piece(choice, piece)) == expected
