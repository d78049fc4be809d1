"""`LLM`: offline generation in one object, with the names that vLLM's users know."""

from __future__ import annotations

import operator
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from ..kernels.errors import UsageError
from ..kernels.ops import F32Array
from .beam_records import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from .config import EngineConfig, SpeculativeConfig
from .frontend import Generation
from .launch import launch, open_scorer
from .progress_bar import ProgressBar
from .request import FinishReason, Output, Request, SamplingParams, TokenLogprobs
from .rope_scaling import RopeScaling
from .tokenizer import Tokenizer

Prompt = str | Sequence[int]
PromptDict = Mapping[str, str | Sequence[int]]
Message = dict[str, str]

_DTYPE_NAMES = {"half": "float16", "float": "float32"}  # vLLM's other names
_PROMPTS = "a prompt is a text or a list of token ids; several are a list of those"
_MESSAGES = (
    "a conversation is a list of messages such as {'role': 'user', 'content': 'hi'}; several are a list of those"
)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's n sequences. `logprobs` has one entry per token if they were asked for.

    A sequence for which the model gave NaN ends with FinishReason.ERROR and says so in `error`; the others go on.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    error: str = ""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its completions, `outputs` in order of index.

    `prompt_logprobs`, if asked for, has one entry per token of the prompt; the first has no probability and is None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class LLM:
    """A model ready to generate, on an engine of its own.

    Scripts for vLLM may go on to name `tokenizer` (the model's own), `tensor_parallel_size` (1) and `trust_remote_code`
    (a model's own code is not run in any case); what they name and cannot have is an error.

    `process=True` runs the engine in a process of its own. Every other keyword is a field of EngineConfig;
    `speculative_config` and `rope_scaling` are also taken as dicts of their fields. Use it as a context manager, or
    call `close`, to release the memory.

    Raises LlmctlError (see `llmctl.kernels.errors`) for a model or an option that cannot work here.
    """

    def __init__(
        self,
        model: str = "",
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        kv_cache_dtype_skip_layers: Sequence[str | int] | str | int = (),
        max_model_len: int | None = None,
        rope_scaling: RopeScaling | Mapping[str, object] | None = None,
        hf_overrides: Mapping[str, object] | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        block_size: int = 32,
        num_gpu_blocks_override: int = 0,
        kv_cache_memory_bytes: int = 0,
        gpu_memory_utilization: float = 0.0,
        enable_prefix_caching: bool = True,
        cache_eviction: str = "lru-k",
        cache_eviction_k: int = 2,
        cache_audit: float = 0.0,
        swap_space: float = 0.0,
        preemption_mode: str = "auto",
        scheduling_policy: str = "hybrid",
        tenant_weights: Mapping[str, float] | None = None,
        itl_target_ms: float = 0.0,
        max_prefill_tokens_beside_decode: int = 0,
        threads: int = 0,
        seed: int | None = None,
        async_depth: int = 0,
        device: str = "auto",
        enforce_eager: bool = False,
        deterministic: bool = False,
        jit: bool = True,
        kernels: str = "auto",
        attention_compute: str = "auto",
        model_impl: str = "auto",
        speculative_config: SpeculativeConfig | dict[str, str | int] | None = None,
        process: bool = False,
        tensor_parallel_size: int = 1,
        trust_remote_code: bool = False,
    ) -> None:
        _check_claims(model, tokenizer, tensor_parallel_size)
        self.config = EngineConfig(
            model=model,
            dtype=_DTYPE_NAMES.get(dtype, dtype),
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_dtype_skip_layers=_layers(kv_cache_dtype_skip_layers),
            max_model_len=0 if max_model_len is None else max_model_len,
            rope_scaling=_rope_scaling(rope_scaling, hf_overrides),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            cache_eviction=cache_eviction,
            cache_eviction_k=cache_eviction_k,
            cache_audit=cache_audit,
            swap_space=swap_space,
            preemption_mode=preemption_mode,
            scheduling_policy=scheduling_policy,
            tenant_weights=_weights(tenant_weights),
            itl_target_ms=itl_target_ms,
            max_prefill_tokens_beside_decode=max_prefill_tokens_beside_decode,
            threads=threads,
            seed=0 if seed is None else seed,
            async_depth=async_depth,
            device=device,
            enforce_eager=enforce_eager,
            deterministic=deterministic,
            jit=jit,
            kernels=kernels,
            attention_compute=attention_compute,
            model_impl=model_impl,
            speculative_config=_speculation(speculative_config),
        )
        self.frontend = launch(self.config, process=process)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        tenant: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Complete the prompts (texts or token ids), all at once through the engine's batch; in their order.

        One SamplingParams serves all prompts, a sequence of them goes prompt by prompt; so does `tenant`, whose share
        of the engine a prompt takes (`tenant_weights`). Raises UsageError or CapacityError before anything runs if one
        of the requests cannot work. No prompts give no results. `use_tqdm` shows on stderr how many are done.
        """
        texts = _prompts(prompts)
        params = _per_prompt(sampling_params, len(texts))
        whose = _tenants(tenant, len(texts))
        each = zip(texts, params, whose, strict=True)
        requests = [self.frontend.request(text, one, tenant=name) for text, one, name in each]
        names = [text if isinstance(text, str) else None for text in texts]
        with ProgressBar(len(requests)) if use_tqdm else nullcontext() as bar:
            return list(self._run(requests, names, bar))

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once, through the model's chat template."""
        prompts = [self.frontend.chat_prompt(conversation) for conversation in _conversations(messages)]
        return self.generate(prompts, sampling_params or self.frontend.sampling_defaults)

    def beam_search(
        self, prompts: Prompt | PromptDict | Sequence[Prompt | PromptDict], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, found as transformers' `generate` with num_beams does.

        A prompt may also be vLLM's dict with `prompt` or `prompt_token_ids`.
        """
        results = self.generate([_plain(each) for each in _listed(prompts)], params.sampling())
        return [
            BeamSearchOutput(tuple(self._hypothesis(result, one, params) for one in result.outputs))
            for result in results
        ]

    def _hypothesis(self, result: RequestOutput, one: CompletionOutput, params: BeamSearchParams) -> BeamSearchSequence:
        tokens = (*result.prompt_token_ids, *one.token_ids)
        stopped = one.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output
        text = self.get_tokenizer().decode(list(tokens[:-1] if stopped else tokens))
        total = one.cumulative_logprob or 0.0
        score = total / max(1, len(one.token_ids)) ** params.length_penalty
        return BeamSearchSequence(tokens, text, one.logprobs or (), total, score, one.finish_reason, one.error)

    def hidden_states(self, token_ids: Sequence[int]) -> F32Array:
        """[tokens, hidden size] float32: the model's last hidden state, after the final norm, at each of these tokens.

        Of a result, give its `prompt_token_ids` and the `token_ids` of an output. The model's weights are mapped once
        more for each call; for many texts make a Scorer with `engine.launch.open_scorer`, which has their logits too.
        """
        return open_scorer(self.config, len(token_ids)).hidden_states(token_ids)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.frontend.tokenizer

    def close(self) -> None:
        """Stop the engine and release its memory."""
        self.frontend.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, requests: list[Request], names: list[str | None], bar: ProgressBar | None
    ) -> Iterator[RequestOutput]:
        client, outputs = self.frontend.client, queue.SimpleQueue[Output]()
        collectors: dict[str, _Collector] = {}
        try:
            for request in requests:
                collectors[request.id] = _Collector(self.frontend.open(request, outputs.put))
            open_ids = set(collectors)
            while open_ids:
                output = outputs.get()
                collector = collectors[output.request_id]
                collector.push(output)
                if collector.generation.finished:
                    open_ids.discard(output.request_id)
                if bar is not None:
                    bar.add(len(output.tokens), collector.generation.finished)
        finally:
            for collector in collectors.values():
                collector.generation.close()
        if (failure := client.failure) is not None:
            raise failure
        for request, name in zip(requests, names, strict=True):
            yield collectors[request.id].result(name)


class _Collector:
    """Gathers one request's sequences."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        count = generation.request.sampling.n
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(count)]
        self._finish: list[FinishReason | None] = [None] * count
        self._errors = [""] * count
        self._cached = 0
        self._prompt: tuple[TokenLogprobs, ...] = ()

    def push(self, output: Output) -> None:
        delta = self.generation.take(output)
        if delta is None:
            return
        self._texts[delta.index].append(delta.text)
        self._tokens[delta.index].extend(delta.tokens)
        self._logprobs[delta.index].extend(delta.logprobs)
        self._prompt = self._prompt or delta.prompt_logprobs
        self._cached = max(self._cached, output.cached_tokens)
        self._finish[delta.index] = delta.finish or self._finish[delta.index]
        self._errors[delta.index] = delta.error

    def result(self, prompt: str | None) -> RequestOutput:
        request = self.generation.request
        wanted = request.sampling.logprobs is not None
        completions = []
        for index, finish in enumerate(self._finish):
            assert finish is not None, f"sequence {index} of {request.id} has not finished"
            logprobs = tuple(self._logprobs[index])
            total = sum(entry.logprob for entry in logprobs) if logprobs else None
            text = "".join(self._texts[index])
            tokens = tuple(self._tokens[index])
            error = self._errors[index]
            completions.append(
                CompletionOutput(index, text, tokens, total, logprobs if wanted else None, finish, error)
            )
        of_prompt = None if request.sampling.prompt_logprobs is None else (None, *self._prompt)
        return RequestOutput(request.id, prompt, request.prompt, tuple(completions), self._cached, of_prompt)


def _check_claims(model: str, tokenizer: str | None, ranks: int) -> None:
    """UsageError for what a script for vLLM names and cannot have."""
    if tokenizer and tokenizer != model:
        raise UsageError(f"tokenizer is `{tokenizer}`, only the model's own can be named", "leave it out")
    if ranks != 1:
        raise UsageError(
            f"tensor_parallel_size is {ranks}, a model runs in one engine on this machine", "leave it out, or give 1"
        )


def _layers(given: Sequence[str | int] | str | int) -> tuple[str, ...]:
    """The names of layers, as vLLM's users give them: numbers too, and one alone."""
    several = (given,) if isinstance(given, str | int) else tuple(given)
    return tuple(str(layer) for layer in several)


def _rope_scaling(
    given: RopeScaling | Mapping[str, object] | None, overrides: Mapping[str, object] | None
) -> RopeScaling | None:
    """The one of the two that is given. vLLM has the second name, and a config's keys in it."""
    if given is not None and overrides is not None:
        raise UsageError("both rope_scaling and hf_overrides are given", "give one of them")
    either = overrides if given is None else given
    return either if either is None or isinstance(either, RopeScaling) else RopeScaling.read(dict(either))


def _weights(given: Mapping[str, float] | None) -> dict[str, float]:
    """The weights of tenants, whole numbers too; UsageError for what is no mapping of names to numbers."""
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"tenant_weights is {_shown(given)}", "write it as {'alice': 3, 'bob': 1}")
    return dict(given or {})


def _tenants(given: str | Sequence[str], count: int) -> list[str]:
    """Whose share each of the prompts is."""
    if isinstance(given, str):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(name, str) for name in given):
        raise UsageError(f"tenant is {_shown(given)}", "give one name for all prompts, or one per prompt")
    if len(given) != count:
        raise UsageError(f"{count} prompts but {len(given)} tenants", "give one for all, or one per prompt")
    return list(given)


def _speculation(given: SpeculativeConfig | dict[str, str | int] | None) -> SpeculativeConfig:
    if isinstance(given, SpeculativeConfig):
        return given
    return SpeculativeConfig.read(given or {})


def _prompts(given: object) -> list[Prompt]:
    """What was given as prompts, each a text or token ids; UsageError says which one is neither."""
    if isinstance(given, str):
        return [given]
    items = _items(given, "prompts are")
    if items and all(_is_token(item) for item in items):
        return [items]
    for number, item in enumerate(items):
        if not isinstance(item, str) and not all(map(_is_token, _items(item, f"prompt {number} is"))):
            raise UsageError(f"prompt {number} is {_shown(item)}", _PROMPTS)
    return items


def _listed(prompts: object) -> list[Any]:
    """The prompts one by one, vLLM's dicts among them left as they are."""
    items = [prompts] if isinstance(prompts, str | Mapping) else _items(prompts, "prompts are")
    return [items] if items and all(_is_token(item) for item in items) else items


def _plain(prompt: Prompt | PromptDict) -> Prompt:
    """A prompt out of vLLM's dict, if it is one that says nothing else."""
    if isinstance(prompt, Mapping) and len(prompt) == 1:
        for name in ("prompt", "prompt_token_ids"):
            if name in prompt:
                return prompt[name]
    return prompt  # type: ignore[return-value]  # what is no prompt is refused where all prompts are read


def _conversations(given: object) -> list[list[Message]]:
    """What was given as one conversation or several; UsageError says which is none."""
    items = _items(given, "messages are")
    conversations = [items] if items and isinstance(items[0], Mapping) else items
    found = []
    for number, conversation in enumerate(conversations):
        found.append(_items(conversation, f"conversation {number} is"))
        if not all(isinstance(message, Mapping) for message in found[-1]):
            raise UsageError(f"conversation {number} is {_shown(conversation)}", _MESSAGES)
    return found


def _items(given: object, what: str) -> list[Any]:
    """The elements of a sequence or array; UsageError for a text, bytes, a mapping and what is no sequence."""
    if isinstance(given, str | bytes | bytearray | memoryview | Mapping) or not isinstance(given, Iterable):
        raise UsageError(f"{what} {_shown(given)}", _PROMPTS if "prompt" in what else _MESSAGES)
    return list(given)


def _is_token(item: object) -> bool:
    try:
        operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(item, bool)


def _shown(given: object) -> str:
    text = repr(given)
    return f"a {type(given).__name__}: {text if len(text) <= 60 else text[:57] + '...'}"


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise UsageError(f"sampling params are {_shown(params)}", "give one SamplingParams for all, or one per prompt")
    if len(params) != count:
        raise UsageError(f"{count} prompts but {len(params)} sampling params", "give one for all, or one per prompt")
    return list(params)
