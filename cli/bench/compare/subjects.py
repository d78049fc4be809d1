"""What is compared: servers that the command starts itself, ours or llama.cpp's, and any that runs already.

A subject is written `NAME=KIND:...`; see `parse_subject`. Each kind knows its command line and how it is asked. All are
asked with token ids, greedily, for answers of an exact length, and none may answer from a prompt that it knows.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import Protocol

import httpx

from ....engine.request import SamplingParams
from ....kernels.errors import UsageError
from ..http_target import COMPLETIONS, Endpoint, OpenAIServer, find_model, join_url
from ..targets import Target
from .llama_target import LlamaTarget

HOST = "127.0.0.1"
_GREEDY = SamplingParams(temperature=0, ignore_eos=True)
_FORMS = (
    "write `NAME=llmctl:MODEL[:OPTIONS]`, `NAME=llama-server:PROGRAM:MODEL.gguf[:OPTIONS]` or `NAME=url:http://...`"
)


class Subject(Protocol):
    """`name` stands in tables. `command` is empty for a server that runs already, and `url` for one that does not."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def model(self) -> str:
        """What its model is called on this machine, "" if that is not known."""

    def command(self, port: int, threads: int) -> tuple[str, ...]: ...
    async def target(self, client: httpx.AsyncClient, base_url: str, pids: tuple[int, ...]) -> Target:
        """What requests are sent to, once the server is ready."""


@dataclass(frozen=True, slots=True)
class Llmctl:
    """`llmctl serve` of this very installation."""

    name: str
    model: str
    options: tuple[str, ...]
    url: str = ""

    def command(self, port: int, threads: int) -> tuple[str, ...]:
        return (
            sys.executable, "-m", __name__.partition(".")[0], "serve", self.model,
            "--host", HOST, "--port", str(port), "--threads", str(threads), "--disable-log-requests", *self.options,
        )  # fmt: skip

    async def target(self, client: httpx.AsyncClient, base_url: str, pids: tuple[int, ...]) -> Target:
        return await _openai(self.name, client, base_url, pids)


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """llama.cpp's own server, asked through its own endpoint, which says how many tokens each piece holds."""

    name: str
    program: str
    model: str
    options: tuple[str, ...]
    url: str = ""

    def command(self, port: int, threads: int) -> tuple[str, ...]:
        return (
            self.program, "-m", self.model, "--host", HOST, "--port", str(port),
            "-t", str(threads), "-tb", str(threads), *self.options,
        )  # fmt: skip

    async def target(self, client: httpx.AsyncClient, base_url: str, pids: tuple[int, ...]) -> Target:
        return LlamaTarget(self.name, client, join_url(base_url, "/completion"), pids)


@dataclass(frozen=True, slots=True)
class Url:
    """A server that runs already and speaks the OpenAI API; where it runs and how it was started is not known."""

    name: str
    url: str
    model: str = ""

    def command(self, port: int, threads: int) -> tuple[str, ...]:
        return ()

    async def target(self, client: httpx.AsyncClient, base_url: str, pids: tuple[int, ...]) -> Target:
        return await _openai(self.name, client, base_url, pids)


def parse_subject(text: str) -> Subject:
    """The subject that is written so. OPTIONS are split as a shell does, and stand last on its command line."""
    name, equals, rest = text.partition("=")
    kind, colon, rest = rest.partition(":")
    name = name.strip()
    if not name or not equals or not colon or not rest:
        raise UsageError(f"--subject is `{text}`", _FORMS)
    if kind == "llmctl":
        model, _, options = rest.partition(":")
        return Llmctl(name, model, _split(text, options))
    if kind == "llama-server":
        program, _, rest = rest.partition(":")
        model, _, options = rest.partition(":")
        if not program or not model:
            raise UsageError(f"--subject is `{text}`, which lacks a program or a model", _FORMS)
        return LlamaServer(name, program, model, _split(text, options))
    if kind == "url":
        join_url(rest, COMPLETIONS)  # refuses what is no URL
        return Url(name, rest)
    raise UsageError(f"--subject is `{text}`: `{kind}` is no kind of server", _FORMS)


def parse_subjects(texts: list[str]) -> tuple[Subject, ...]:
    """At least two subjects with names of their own; ratios are those of the first to each other one."""
    subjects = tuple(parse_subject(text) for text in texts)
    if len(subjects) < 2:
        raise UsageError(f"{len(subjects)} subjects are no comparison", f"give --subject twice or more: {_FORMS}")
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        raise UsageError(f"two subjects have one name: {', '.join(names)}", "give each a name of its own")
    return subjects


def _split(text: str, options: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(options))
    except ValueError as error:
        raise UsageError(f"--subject is `{text}`: {error}", "close every quotation mark") from error


async def _openai(name: str, client: httpx.AsyncClient, base_url: str, pids: tuple[int, ...]) -> Target:
    model, _ = await find_model(client, base_url, "", "", 0)
    return OpenAIServer(client, Endpoint(join_url(base_url, COMPLETIONS), False, model), _GREEDY, pids, name)
