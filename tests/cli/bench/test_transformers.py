"""transformers as a target: static batches whose tokens are those of its own `generate`, in a process of its own."""

import asyncio
import os
import signal

import pytest
import torch
import transformers

from llmctl.cli.bench.drive import drive
from llmctl.cli.bench.load_shape import Load
from llmctl.cli.bench.peers import load_transformers
from llmctl.cli.bench.transformers_target import start_transformers
from llmctl.cli.bench.transformers_worker import Ask, generate
from llmctl.cli.bench.workload import Item
from llmctl.engine.config import environment
from llmctl.engine.load.hub import Source, resolve
from llmctl.kernels.errors import LlmctlError
from tests.engine.gguf_files import gemma3_config, write_gemma3, write_llama3
from tests.engine.tiny import FAMILIES, VOCAB, randomize, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(model, prompt, count):
    ids = torch.tensor([prompt])
    settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=count, pad_token_id=0)  # and no EOS
    model.generation_config.eos_token_id = None
    out = model.generate(ids, generation_config=settings)
    return out[0, len(prompt) :].tolist()


def answers(model, batch, takes_out=()):
    found = {ask.id: [] for ask in batch}
    done = []
    with torch.inference_mode():
        for step, happened in enumerate(generate(model, batch)):
            for number, token in zip(happened.ids, happened.tokens, strict=True):
                found[number].append(token)
            done += happened.done
            if step == 1:
                batch[:] = [ask for ask in batch if ask.id not in takes_out]
    return found, done


def test_padded_batch_gives_the_tokens_of_each_prompt_alone(model):
    rng = torch.Generator().manual_seed(5)
    prompts = [tuple(torch.randint(3, VOCAB, (n,), generator=rng).tolist()) for n in (3, 17, 9)]
    lengths = (6, 2, 9)
    found, done = answers(model, [Ask(i, p, n) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))])
    assert done == [1, 0, 2]
    assert [found[i] for i in range(3)] == [greedy(model, p, n) for p, n in zip(prompts, lengths, strict=True)]


def test_stop_token_ends_an_answer_and_a_request_that_was_taken_out_is_not_waited_for(model):
    prompt = (5, 6, 7)
    expected = greedy(model, prompt, 8)
    stop = expected[3]
    found, done = answers(model, [Ask(0, prompt, 8, (stop,))])
    assert found[0] == expected[: expected.index(stop) + 1] and done == [0]
    found, done = answers(model, [Ask(0, prompt, 100), Ask(1, prompt, 3)], takes_out=(0,))
    assert found[1] == expected[:3] and len(found[0]) == 3 and done == [1]


def test_worker_answers_times_out_and_ends(folder):
    async def main():
        source = resolve(str(folder), environment=environment())
        target = await start_transformers(source, 1, ())
        try:
            assert target.pids[0] > 0
            items = [Item((5, 6, 7), 4), Item((5,) * 20, 6)]
            seen = await drive(target, items, (0.0, 0.0), Load(2), 300)
            gone = await drive(target, [Item((5, 6, 7), 100_000)], (0.0,), Load(), 0.5)
            after = await drive(target, items[:1], (0.0,), Load(), 300)
            asyncio.get_running_loop().call_later(0.2, os.kill, target.pids[0], signal.SIGKILL)
            killed = await drive(target, [Item((5, 6, 7), 100_000)], (0.0,), Load(), 300)
            with pytest.raises(LlmctlError, match="transformers has ended"):
                await drive(target, items, (0.0, 0.0), Load(2), 300)
        finally:
            await target.close()
        return seen, gone, after, killed

    seen, gone, after, killed = asyncio.run(main())
    assert killed.observations[0].outcome == "failed" and "transformers has ended" in killed.observations[0].error
    assert [(one.outcome, one.output_tokens, one.streamed_tokens) for one in seen.observations] == [
        ("ok", 4, 4), ("ok", 6, 6),
    ]  # fmt: skip
    assert [one.prompt_tokens for one in seen.observations] == [3, 20]
    assert gone.observations[0].outcome == "timed out"
    assert after.observations[0].outcome == "ok", "what nobody waits for does not hold up the next"


def test_worker_that_cannot_load_says_why(tmp_path):
    async def main():
        await start_transformers(Source(tmp_path / "none", "hf", "none"), 1, ())

    with pytest.raises(LlmctlError, match=r"transformers could not be started: .*none"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("config", "write"),
    [(gemma3_config(7), write_gemma3), (FAMILIES["llama3-rope"], write_llama3)],
    ids=["gemma3", "llama3"],
)
def test_the_peer_of_a_gguf_file_computes_what_the_file_holds(config, write, tmp_path):
    """Norms of a Gemma 3 file hold the 1 that transformers adds; a Llama 3 file lists divisors of frequencies."""
    oracle = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(oracle)
    peer = load_transformers(Source(write(tmp_path / "model.gguf", oracle), "gguf", "tiny"))
    tokens = torch.randint(3, VOCAB, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = oracle(tokens).logits, peer(tokens).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
