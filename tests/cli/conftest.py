"""Streams that can be read back, and an engine that answers from a script."""

import io
import types

import pytest

from llmctl.cli.console import Console
from llmctl.engine.request import FinishReason, SamplingParams
from llmctl.kernels.errors import CapacityError


@pytest.fixture
def make_console():
    """A Console on memory streams; `tty` says which of stdin, stdout, stderr are terminals."""

    def make(stdin="", tty=()):
        flags = {f"{name}_tty": name in tty for name in ("stdin", "stdout", "stderr")}
        return Console(io.StringIO(stdin), io.StringIO(), io.StringIO(), **flags, color=False)

    return make


@pytest.fixture
def console(make_console):
    return make_console()


class FakeFrontend:
    """Answers each request with the next script: pieces of text, or an exception to raise at that point."""

    def __init__(self, *scripts, max_model_len=100, defaults=None):
        self.scripts = list(scripts)
        self.asked, self.sampled, self.aborted, self.closed = [], [], 0, False
        self.sampling_defaults = defaults or SamplingParams()
        self.client = types.SimpleNamespace(failure=None)
        self.info = types.SimpleNamespace(
            model="fake",
            max_model_len=max_model_len,
            vocab_size=1000,
            weight_format="int4g32",
            model_impl="llmctl",
        )

    def chat_prompt(self, messages):
        self.asked.append([dict(message) for message in messages])
        return [1] * sum(len(message["content"].split()) + 1 for message in messages)

    def stream(self, prompt, sampling):
        self.sampled.append(sampling)
        if len(prompt) >= self.info.max_model_len:
            raise CapacityError(f"the prompt has {len(prompt)} tokens, the context holds {self.info.max_model_len}")
        return self._stream(len(prompt), self.scripts.pop(0))

    def _stream(self, prompt_tokens, script):
        done = False
        try:
            for number, piece in enumerate(script):
                if isinstance(piece, BaseException):
                    raise piece
                yield delta(piece, (number,))
            done = True
            yield delta("", (), FinishReason.STOP, usage(prompt_tokens, len(script)))
        finally:
            self.aborted += not done

    def close(self):
        self.closed = True


def usage(prompt, completion, cached=3):
    return types.SimpleNamespace(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def delta(text, tokens, finish=None, usage=None, error=""):
    return types.SimpleNamespace(index=0, text=text, tokens=tokens, finish=finish, error=error, usage=usage)


@pytest.fixture
def fake_frontend():
    return FakeFrontend
