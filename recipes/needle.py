"""Can a model find one sentence in a long text, and does the KV cache's format change what it answers?

    python needle.py MODEL TEXT.txt --tokens 8192 --kv-cache-dtype float16 fp8 int8

The sentence is put at five depths of a text of so many tokens, and the model is asked for what it said. Each format has
a process of its own, so that its memory can be told. `--rope` is a config's `rope_scaling`, for texts longer than the
model's context. The deepest place comes first: the prefix cache then has what is above each of the others.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import get_context, parent_process
from pathlib import Path

from llmctl import LLM, SamplingParams
from llmctl.cli.console import terminal
from llmctl.cli.exits import exit_code
from llmctl.engine.config import KV_DTYPES
from llmctl.engine.load.progress import Progress
from llmctl.kernels.errors import LlmctlError, UsageError

NUMBER = "48213"
NEEDLE = f"\n\nThe secret number of the lighthouse keeper is {NUMBER}. Remember it.\n\n"
QUESTION = "What is the secret number of the lighthouse keeper? Answer with the number alone."
SYSTEM = "You answer questions about a text."
DEPTHS = (0.9, 0.7, 0.5, 0.3, 0.1)
FRAME_TOKENS = 200  # for the needle, the question, the template and the answer
ANSWER_TOKENS = 16
STEP_TOKENS = 512
BLOCK_TOKENS = 32
LOOK_S = 0.5  # between two looks at how far the engine is


@dataclass(frozen=True, slots=True)
class Question:
    """What every format is asked."""

    model: str
    text: Path
    tokens: int
    rope: dict[str, object] | None
    depths: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model with one format of cache said about one depth. `memory_bytes` is what its process grew by."""

    kv_cache_dtype: str
    depth: float
    answer: str
    found: bool
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    memory_bytes: int


def main() -> int:
    console = terminal()
    question, formats, wants_json = read_arguments()
    answers: list[Answer] = []
    try:
        with workers() as fresh:
            for kv_cache_dtype in formats:
                answers += fresh.submit(ask, question, kv_cache_dtype).result()
    except LlmctlError as error:
        console.error(error.message, error.hint)
        return exit_code(error)
    standard = "float16" if "float16" in formats else formats[0]
    said = {answer.depth: answer.token_ids for answer in answers if answer.kv_cache_dtype == standard}
    same = [answer.token_ids == said[answer.depth] for answer in answers]
    if wants_json:
        rows = [asdict(answer) | {"same_as_standard": alike} for answer, alike in zip(answers, same)]
        asked = {"model": question.model, "text": question.text.name, "tokens": question.tokens, "rope": question.rope}
        console.json(asked | {"standard": standard, "answers": rows})
        return 0
    columns = ("format", ">depth", "answer", "", f"beside {standard}", ">tokens", ">cached", ">s", ">MiB")
    table = [
        (
            *(answer.kv_cache_dtype, f"{answer.depth:.1f}", " ".join(answer.answer.split())),
            "found" if answer.found else "not found",
            "" if answer.kv_cache_dtype == standard else "same" if alike else "different",
            *(f"{answer.prompt_tokens:,}", f"{answer.cached_tokens:,}"),
            *(f"{answer.seconds:.0f}", f"{answer.memory_bytes / (1 << 20):,.0f}"),
        )
        for answer, alike in zip(answers, same)
    ]
    console.table(columns, table, f"one sentence in {question.tokens:,} tokens of {question.text.name}")
    for kv_cache_dtype in formats:
        own = [(each.found, alike) for each, alike in zip(answers, same) if each.kv_cache_dtype == kv_cache_dtype]
        line = f"{kv_cache_dtype}: {sum(found for found, _ in own)} of {len(own)} found"
        if kv_cache_dtype != standard:
            line += f", {sum(alike for _, alike in own)} answers the same as with {standard}"
        console.data(line)
    return 0


def read_arguments() -> tuple[Question, list[str], bool]:
    """(what to ask, formats of the cache, whether JSON is wanted)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="as for `llmctl chat`")
    parser.add_argument("text", type=Path, help="a text file, longer than what is asked for")
    parser.add_argument("--tokens", type=int, default=8192, help="of the whole prompt and its answer (8192)")
    parser.add_argument("--rope", type=json.loads, help="a config's rope_scaling, as JSON")
    parser.add_argument("--kv-cache-dtype", nargs="+", choices=KV_DTYPES, default=["auto"], help="one or several")
    parser.add_argument("--depths", type=float, nargs="+", default=DEPTHS, help="places, from 0 to 1")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.tokens <= FRAME_TOKENS:
        parser.error(f"--tokens is {given.tokens}, {FRAME_TOKENS} of them are for the question: give more")
    for depth in given.depths:
        if not 0 <= depth <= 1:
            parser.error(f"--depths has {depth}, which is not from 0 to 1")
    question = Question(given.model, given.text, given.tokens, given.rope, tuple(given.depths))
    return question, list(dict.fromkeys(given.kv_cache_dtype)), given.json


def workers() -> ProcessPoolExecutor:
    """One process at a time, and a new one for each format. None outlives this one, even if that is killed."""
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=end_with_parent, max_tasks_per_child=1)


def end_with_parent() -> None:
    """Have this process end as soon as the one that started it has: else it would wait for work forever."""
    parent = parent_process()
    assert parent is not None, "only workers are started with this"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def ask(question: Question, kv_cache_dtype: str) -> list[Answer]:
    """The answers of a model with this format of cache, in the order of depths. How far it is goes to stderr."""
    with terminal().progress() as progress:
        before = proportional_bytes()
        llm = LLM(
            question.model,
            max_model_len=question.tokens,
            rope_scaling=question.rope,
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=1,
            max_num_batched_tokens=STEP_TOKENS,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=-(-question.tokens // BLOCK_TOKENS),
        )
        with llm:
            return [
                Answer(kv_cache_dtype, *said, proportional_bytes() - before)
                for said in answers_of(llm, question, f"{kv_cache_dtype}, {question.tokens} tokens", progress)
            ]


def answers_of(
    llm: LLM, question: Question, description: str, progress: Progress
) -> Iterator[tuple[float, str, bool, tuple[int, ...], int, int, float]]:
    """For each depth what `Answer` has from `depth` on, but the memory."""
    tokenizer = llm.get_tokenizer()
    hay = tokenizer.encode(question.text.read_text())
    room = question.tokens - FRAME_TOKENS
    if len(hay) < room:
        raise UsageError(f"{question.text} has {len(hay)} tokens, {room} are needed", "give a longer text")
    shares = [1.0, *(1 - min(pair) for pair in pairwise(question.depths))]  # of the text, what has to be computed
    steps = sum(int(room * share) // STEP_TOKENS + ANSWER_TOKENS for share in shares)
    with ThreadPoolExecutor(1) as aside:
        for depth in question.depths:
            place = int(room * depth)
            text = tokenizer.decode(hay[:place]) + NEEDLE + tokenizer.decode(hay[place:room])
            conversation = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{text}\n\n{QUESTION}"},
            ]
            started = time.perf_counter()
            waiting = aside.submit(llm.chat, conversation, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS))
            while wait((waiting,), LOOK_S).not_done:
                progress(description, min(llm.frontend.stats().steps, steps), steps)
            result = waiting.result()[0]
            said = result.outputs[0]
            counts = len(result.prompt_token_ids), result.num_cached_tokens, time.perf_counter() - started
            yield depth, said.text.strip(), NUMBER in said.text, said.token_ids, *counts


def proportional_bytes() -> int:
    """Bytes that this process takes, shared pages by their share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    sys.exit(main())
