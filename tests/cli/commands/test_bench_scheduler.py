"""`llmctl bench scheduler`: what a step costs without a model."""

import itertools
import json

import pytest

from llmctl.cli import app
from llmctl.cli.bench.scheduling import step_cost
from llmctl.cli.exits import ExitCode
from llmctl.engine.config import EngineConfig


def test_a_step_costs_what_the_clock_says_of_schedule_and_update():
    ticks = itertools.count(0, 3000)
    cost = step_cost(EngineConfig(), 3, steps=4, clock=lambda: next(ticks))
    assert (cost.running, cost.steps) == (3, 4)
    assert (cost.schedule_us, cost.update_us, cost.total_us, cost.tree_us) == (3, 3, 6, 0)


def test_costs_are_shown_for_every_number_of_sequences(console):
    line = ["bench", "scheduler", "--running", "1,5", "--steps", "3"]
    assert app.run([*line, "--json"], console) == ExitCode.OK
    assert [each["running"] for each in json.loads(console.stdout.getvalue())["costs"]] == [1, 5]
    assert app.run(line, console) == ExitCode.OK
    assert "of it the tree" in console.stdout.getvalue()


@pytest.mark.parametrize("options", [["--running", "0"], ["--steps", "0"], ["--scheduling-policy", "best"]])
def test_what_cannot_be_measured_is_a_usage_error(console, options):
    assert app.run(["bench", "scheduler", *options], console) == ExitCode.USAGE
