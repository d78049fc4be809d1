"""Can a model find one sentence in a long text? `python needle.py MODEL TEXT.txt --tokens 8192`.

The sentence is put at five depths of a text of so many tokens, and the model is asked for what it said. `--rope` is a
config's `rope_scaling`, for texts longer than the model's context. The deepest place comes first, so that the prefix
cache computes what is above each of the others only once.
"""

import argparse
import json
import time
from pathlib import Path

from llmctl import LLM, SamplingParams

NEEDLE = "\n\nThe secret number of the lighthouse keeper is 48213. Remember it.\n\n"
QUESTION = "What is the secret number of the lighthouse keeper? Answer with the number alone."
SYSTEM = "You answer questions about a text."
DEPTHS = (0.9, 0.7, 0.5, 0.3, 0.1)


def pss() -> int:
    """Bytes that this process takes, shared pages by their share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


arguments = argparse.ArgumentParser()
arguments.add_argument("model")
arguments.add_argument("text", type=Path)
arguments.add_argument("--tokens", type=int, default=8192)
arguments.add_argument("--rope", type=json.loads)
arguments.add_argument("--kv-cache-dtype", default="auto")
arguments.add_argument("--depths", type=float, nargs="*", default=DEPTHS)
given = arguments.parse_args()

before = pss()
llm = LLM(
    given.model,
    max_model_len=given.tokens,
    rope_scaling=given.rope,
    kv_cache_dtype=given.kv_cache_dtype,
    max_num_seqs=1,
    num_gpu_blocks_override=-(-given.tokens // 32),
)
tokenizer = llm.frontend.tokenizer
hay = tokenizer.encode(given.text.read_text())
room = given.tokens - 200  # for the needle, the question, the template and the answer
if len(hay) < room:
    raise SystemExit(f"{given.text} has {len(hay)} tokens, {room} are needed")
found = 0
for depth in given.depths:
    place = int(room * depth)
    text = tokenizer.decode(hay[:place]) + NEEDLE + tokenizer.decode(hay[place:room])
    conversation = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{text}\n\n{QUESTION}"},
    ]
    started = time.perf_counter()
    answer = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=16))[0]
    right = "48213" in answer.outputs[0].text
    found += right
    print(
        f"depth {depth:.1f}: {'found' if right else 'not found'}: {answer.outputs[0].text.strip()!r} "
        f"({len(answer.prompt_token_ids)} tokens, {answer.num_cached_tokens} of them cached, "
        f"{time.perf_counter() - started:.0f} s, {(pss() - before) >> 20} MiB more than before)",
        flush=True,
    )
print(f"{found} of {len(given.depths)} found")
llm.close()
