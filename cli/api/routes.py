"""The endpoints: read, check, and hand over to `Answer` what takes an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ... import __version__
from ...engine.frontend import Frontend
from ...engine.request import ParameterError, Request, SamplingParams, check_range
from ...kernels.errors import LlmctlError
from .answer import Answer, Job
from .chat_shape import ChatShape
from .errors import ApiError, of_llmctl
from .journal import Record
from .responses import Detokenized, Model, ModelList, Sequences, Tokens, Version
from .schema import ChatRequest, CompletionRequest, DetokenizeRequest, Generate, TokenizeRequest, decode
from .service import Service
from .shape import Heading, Shape
from .text_shape import TextShape
from .translate import chat_messages, chat_sampling, completion_prompts, completion_sampling

MAX_BODY = 32 << 20
MOST_TOKENS = 1 << 17  # that /tokenize makes of a text, if the context does not hold more


class Endpoints:
    """One method per endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """The endpoints under their paths."""
        table = [
            ("/v1/chat/completions", self.chat_completions, "POST"),
            ("/v1/completions", self.completions, "POST"),
            ("/v1/models", self.models, "GET"),
            ("/v1/models/{name:path}", self.model, "GET"),
            ("/tokenize", self.tokenize, "POST"),
            ("/detokenize", self.detokenize, "POST"),
            ("/health", self.health, "GET"),
            ("/version", self.version, "GET"),
        ]
        if self._service.settings.metrics:
            table.append(("/metrics", self.metrics, "GET"))
        if self._service.settings.debug_requests:
            table.append(("/debug/requests", self.debug_requests, "GET"))
        return [Route(path, endpoint, methods=[method]) for path, endpoint, method in table]

    async def chat_completions(self, http: HttpRequest) -> Response:
        """Answer a conversation."""
        record = self._enter(http, "/v1/chat/completions")
        asked = decode(await _body(http), ChatRequest)
        model = self._service.check_model(asked.model)
        messages = chat_messages(asked.messages)

        def prepare(frontend: Frontend) -> list[Request]:
            sampling = chat_sampling(asked, self._service.sampling_defaults(frontend))
            sampling.check(frontend.info.vocab_size)
            prompt = frontend.tokenizer.encode_chat(
                messages,
                asked.add_generation_prompt is not False,
                variables=asked.chat_template_kwargs,
                most=frontend.info.max_model_len,
            )
            return [_request(frontend, prompt, sampling, asked, record, 0)]

        def shape(frontend: Frontend, requests: Sequence[Request]) -> ChatShape:
            return ChatShape(
                Heading("chatcmpl-" + record.id, int(time.time()), model, frontend.info.fingerprint),
                frontend.tokenizer,
                bool(asked.logprobs),
                _chunk_usage(asked),
                requests[0].prompt if asked.return_token_ids else None,
            )

        return self._answer(record, asked, _job(asked, 1, prepare, shape, "messages"))

    async def completions(self, http: HttpRequest) -> Response:
        """Continue one text or several."""
        record = self._enter(http, "/v1/completions")
        asked = decode(await _body(http), CompletionRequest)
        model = self._service.check_model(asked.model)
        prompts = completion_prompts(asked)

        def prepare(frontend: Frontend) -> list[Request]:
            sampling = completion_sampling(asked, self._service.sampling_defaults(frontend))
            sampling.check(frontend.info.vocab_size)
            return [
                _request(frontend, prompt, sampling, asked, record, number) for number, prompt in enumerate(prompts)
            ]

        def shape(frontend: Frontend, requests: Sequence[Request]) -> TextShape:
            choices = [(prompt, request) for prompt, request in zip(prompts, requests) for _ in range(asked.n or 1)]
            return TextShape(
                Heading("cmpl-" + record.id, int(time.time()), model, frontend.info.fingerprint),
                frontend.tokenizer,
                [_echo(frontend, prompt) if asked.echo else "" for prompt, _ in choices],
                [request.prompt for _, request in choices] if asked.echo and asked.logprobs is not None else None,
                asked.logprobs,
                _chunk_usage(asked),
                [request.prompt for _, request in choices] if asked.return_token_ids else None,
            )

        return self._answer(record, asked, _job(asked, len(prompts), prepare, shape, "prompt"))

    async def models(self, http: HttpRequest) -> Response:
        """The names under which the model is served."""
        self._enter(http, "/v1/models")
        return _json(ModelList([self._model(name) for name in self._service.settings.names]))

    async def model(self, http: HttpRequest) -> Response:
        """One of them."""
        self._enter(http, "/v1/models/{id}")
        return _json(self._model(self._service.check_model(http.path_params["name"])))

    async def tokenize(self, http: HttpRequest) -> Response:
        """Token ids of a text or of a conversation."""
        self._enter(http, "/tokenize")
        asked = decode(await _body(http), TokenizeRequest)
        self._service.check_model(asked.model)
        frontend = self._service.loaded().frontend
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "give either `prompt` or `messages`", param="prompt")
        messages = None if asked.messages is None else chat_messages(asked.messages)

        def encode() -> list[int]:
            tokenizer, most = frontend.tokenizer, max(MOST_TOKENS, frontend.info.max_model_len)
            if messages is None:
                return tokenizer.encode(asked.prompt or "", asked.add_special_tokens, most)
            return tokenizer.encode_chat(
                messages, asked.add_generation_prompt, variables=asked.chat_template_kwargs, most=most
            )

        try:
            tokens = await asyncio.to_thread(encode)
        except LlmctlError as error:
            raise of_llmctl(error, "prompt" if messages is None else "messages") from error
        names = [frontend.tokenizer.token(token) or "" for token in tokens] if asked.return_token_strs else UNSET
        return _json(Tokens(len(tokens), frontend.info.max_model_len, tokens, names))

    async def detokenize(self, http: HttpRequest) -> Response:
        """The text of token ids, special tokens included."""
        self._enter(http, "/detokenize")
        asked = decode(await _body(http), DetokenizeRequest)
        self._service.check_model(asked.model)
        frontend = self._service.loaded().frontend
        vocab = frontend.info.vocab_size
        if unknown := [token for token in asked.tokens if not 0 <= token < vocab]:
            raise ApiError(400, f"token id {unknown[0]} is not in the vocabulary (0 to {vocab - 1})", param="tokens")
        text = await asyncio.to_thread(frontend.tokenizer.decode, asked.tokens, skip_special=False)
        return _json(Detokenized(text))

    async def health(self, http: HttpRequest) -> Response:
        """Whether the engine makes progress: 200 only if it does."""
        _record(http).endpoint = "/health"
        health = await self._service.health()
        return _json(health, 200 if health.status == "ok" else 503)

    async def version(self, http: HttpRequest) -> Response:
        """Our version, and what the answers' bits depend on besides the request."""
        _record(http).endpoint = "/version"
        try:
            fingerprint = self._service.loaded().frontend.info.fingerprint
        except ApiError:
            fingerprint = None
        return _json(Version(__version__, fingerprint))

    async def metrics(self, http: HttpRequest) -> Response:
        """The figures for Prometheus."""
        _record(http).endpoint = "/metrics"
        await self._service.refresh()
        return Response(self._service.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def debug_requests(self, http: HttpRequest) -> Response:
        """Every sequence that has not ended and the last that have, with all states so far."""
        self._enter(http, "/debug/requests")
        self._service.loaded()
        return _json(Sequences(await self._service.states()))

    def _enter(self, http: HttpRequest, endpoint: str) -> Record:
        """The request's record, after its key was checked."""
        record = _record(http)
        record.endpoint = endpoint
        record.tenant = self._service.check_key(http.headers.get("authorization"))
        return record

    def _answer(self, record: Record, asked: Generate, job: Job) -> Answer:
        record.stream, record.sequences = bool(asked.stream), job.sequences
        record.tenant = record.tenant or asked.user or ""
        return Answer(job, self._service, record)

    def _model(self, name: str) -> Model:
        return Model(name, self._service.created, self._service.loaded().frontend.info.max_model_len)


def _record(http: HttpRequest) -> Record:
    record: Record = http.state.record
    return record


def _job(
    asked: ChatRequest | CompletionRequest,
    prompts: int,
    prepare: Callable[[Frontend], Sequence[Request]],
    shape: Callable[[Frontend, Sequence[Request]], Shape],
    field: str,
) -> Job:
    return Job(
        prompts=prompts,
        samples=_samples(asked),
        prepare=prepare,
        shape=shape,
        stream=bool(asked.stream),
        include_usage=_wants_usage(asked),
        details=asked.logprobs not in (None, False) or bool(asked.return_token_ids),
        prompt=field,
        max_wait_s=_max_wait(asked),
    )


def _samples(asked: Generate) -> int:
    """Sequences for each prompt. ApiError 400 for what no request can have, before it is held against the queue."""
    try:
        check_range("n", asked.n)
    except ParameterError as error:
        raise of_llmctl(error, "n") from error
    return 1 if asked.n is None else asked.n


def _max_wait(asked: Generate) -> float | None:
    """How long the request can wait. ApiError 400 for what is no time."""
    if asked.max_wait is not None and not 0 <= asked.max_wait < 1e9:
        raise ApiError(400, f"`max_wait` is {asked.max_wait:g}, it must be 0 or more seconds", param="max_wait")
    return asked.max_wait


async def _body(http: HttpRequest) -> bytes:
    """The request's body. ApiError 413 as soon as it is too long."""
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > MAX_BODY:
            raise ApiError(413, f"the body is longer than {MAX_BODY >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


def _request(
    frontend: Frontend, prompt: str | list[int], sampling: SamplingParams, asked: Generate, record: Record, number: int
) -> Request:
    return frontend.request(
        prompt,
        sampling,
        request_id=f"{record.id}-{number}",
        tenant=record.tenant,
        priority=asked.priority or 0,
        max_wait_s=asked.max_wait,
        salt=asked.cache_salt or "",
    )


def _echo(frontend: Frontend, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else frontend.tokenizer.decode(prompt, skip_special=False)


def _chunk_usage(asked: Generate) -> UnsetType | None:
    """What the chunks before the last say of usage: null if the last one will tell it."""
    return None if _wants_usage(asked) else UNSET


def _wants_usage(asked: Generate) -> bool:
    return asked.stream_options is not None and bool(asked.stream_options.include_usage)


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
