"""The profile of a step times every op of the decoder, each kind's time with its share."""

import itertools
import json

import msgspec
import pytest

from llmctl.cli import app
from llmctl.cli.bench.profile import Profile, profile, show
from llmctl.cli.exits import ExitCode
from llmctl.engine.config import EngineConfig
from llmctl.engine.load.progress import silent
from llmctl.kernels.errors import CapacityError
from tests.engine.tiny import write_checkpoint

COUNTS = {
    "embed": 1, "norm": 5, "linear q_proj": 2, "linear k_proj": 2, "linear v_proj": 2, "rope_store": 2, "attend": 2,
    "linear o_proj": 2, "linear gate_proj": 2, "linear up_proj": 2, "act_mul": 2, "linear down_proj": 2,
    "linear lm_head": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


def config(folder, **changes):
    return EngineConfig(**{"model": folder, "max_model_len": 128, "num_gpu_blocks_override": 64, **changes})


def test_every_op_is_timed_and_shares_add_up(folder, console):
    ticks = itertools.count()
    found = profile(config(folder), 40, silent, rows=(1, 3), repeats=2, clock=lambda: next(ticks))
    assert [(step.rows, step.context) for step in found.steps] == [(1, 40), (3, 40)]
    for step in found.steps:
        assert {op.kind: op.count for op in step.ops} == COUNTS
        assert {op.kind: op.ms for op in step.ops} == {kind: 1000 * count for kind, count in COUNTS.items()}
        assert sum(op.share for op in step.ops) == pytest.approx(1)
        assert (step.sum_ms, step.replay_ms, step.step_ms) == (27_000, 1000, 1000)
    show(console, found)
    text = console.stdout.getvalue()
    assert "a decode step of 3 with 40 tokens of context" in text
    assert "the recorded program" in text and "3.7%" in text


def test_logits_after_the_profile_are_those_of_the_step(folder):
    """Ops that run one by one in the decoder's order leave what a replay leaves."""
    from llmctl.cli.bench import profile as module

    seen = []
    whole = module._profile_step

    def keep(runner, rows, context, repeats, clock):
        found = whole(runner, rows, context, repeats, clock)
        alone = runner.decoder.logits[:rows].copy()
        runner.decoder.program.replay()
        seen.append((alone == runner.decoder.logits[:rows]).all())
        seen.append((runner.decoder.logits[:rows] == runner.decoder.logits[0]).all())
        return found

    module._profile_step = keep
    try:
        profile(config(folder), 70, silent, rows=(4,), repeats=1)
    finally:
        module._profile_step = whole
    assert seen == [True, True], "all slots have the same context, so all rows are alike"


@pytest.mark.parametrize(
    ("changes", "context", "what"),
    [
        ({}, 128, "129 tokens of context, there are 128"),
        ({"max_num_seqs": 2}, 40, "3 sequences, there are 2"),
        ({"num_gpu_blocks_override": 5}, 60, "6 KV blocks, there are 5"),
        ({"max_num_batched_tokens": 2, "max_num_seqs": 4}, 40, "3 rows in a step, there are 2"),
    ],
)
def test_step_that_does_not_fit_is_an_error(folder, changes, context, what):
    with pytest.raises(CapacityError, match=what):
        profile(config(folder, **changes), context, silent, rows=(1, 3))


def test_command_prints_json_and_refuses_what_it_would_ignore(folder, console, make_console):
    arguments = ["bench", folder, "--profile", "--profile-context", "20", "--max-model-len", "64", "--json"]
    assert app.run([*arguments, "--num-gpu-blocks-override", "40"], console) == ExitCode.OK
    found = msgspec.json.decode(console.stdout.getvalue(), type=Profile)
    assert [step.rows for step in found.steps] == [1, 16]
    assert json.loads(console.stdout.getvalue())["fingerprint"].startswith("llmctl-")
    for extra in (["--num-prompts", "3"], ["--base-url", "http://x"], ["--against", "transformers"], ["--save-result"]):
        console = make_console()
        assert app.run([*arguments, *extra], console) == ExitCode.USAGE
        assert "leave those options out" in console.stderr.getvalue()
    console = make_console()
    assert app.run(["bench", folder, "--profile", "--profile-context", "0"], console) == ExitCode.USAGE
