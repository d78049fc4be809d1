"""Each recipe is read by its command, every key of it becomes an option, and a misspelt one is refused by name."""

import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from llmctl.cli import app
from llmctl.cli.commands import chat as chat_command
from llmctl.cli.commands import serve as serve_command
from llmctl.cli.exits import ExitCode
from llmctl.kernels.errors import UsageError

FOLDER = Path(app.__file__).parents[1] / "recipes"
COMMANDS = ("quantize", "serve", "bench", "chat")
MODEL = "SmolLM2-135M-Instruct"


class Stopped(UsageError):
    """Raised where a command would begin to work."""


@pytest.fixture
def asked(monkeypatch):
    """What each command was about to do: the arguments of the function that would have done it."""
    seen = {}

    def stop(name):
        def stopped(*arguments):
            seen[name] = arguments
            raise Stopped(f"{name} was understood")

        return stopped

    from llmctl.cli.bench import run as bench_run
    from llmctl.cli.quantize import preflight
    from llmctl.engine.load import checkpoint, hub

    monkeypatch.delenv("LLMCTL_MODEL", raising=False)
    monkeypatch.setattr(serve_command, "_run", stop("serve"))
    monkeypatch.setattr(chat_command, "_launch", stop("chat"))
    monkeypatch.setattr(bench_run, "run", stop("bench"))
    monkeypatch.setattr(hub, "resolve", lambda name, **_: name)  # what `prepare` gets is then the model's name
    monkeypatch.setattr(checkpoint, "open_checkpoint", lambda source: source)
    monkeypatch.setattr(preflight, "prepare", stop("quantize"))
    return seen


def run(console, command, path, *more):
    extra = ("-p", "hello") if command == "chat" else ()
    return app.run([command, "--config", str(path), *extra, *more], console)


def parsed(command, path):
    """The parameters that a command gets from a file alone, and the names of those that came from it."""
    root = typer.main.get_command(app.app)
    found = root.get_command(None, command).make_context(command, ["--config", str(path)])
    return found.params, {name for name in found.params if found.get_parameter_source(name).name == "DEFAULT_MAP"}


def keys(content):
    return [key for name, value in content.items() for key in (value if isinstance(value, dict) else [name])]


def test_there_is_one_recipe_for_each_command():
    assert {path.name for path in FOLDER.glob("*.yaml")} == {f"{name}.yaml" for name in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_recipe_is_what_its_first_line_says(console, asked, command):
    path = FOLDER / f"{command}.yaml"
    assert path.read_text().splitlines()[0] == f"# llmctl {command} --config recipes/{command}.yaml"
    run(console, command, path)
    assert list(asked) == [command], console.stderr.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_becomes_an_option(command):
    path = FOLDER / f"{command}.yaml"
    _, from_file = parsed(command, path)
    content = yaml.safe_load(path.read_text())
    assert content["model"] == MODEL
    assert len(from_file) == len(keys(content)) - 1  # the model is handed over apart


@pytest.mark.parametrize("command", COMMANDS)
def test_lines_that_are_commented_out_are_options_too(tmp_path, command):
    text = (FOLDER / f"{command}.yaml").read_text()
    copy = tmp_path / "recipe.yaml"
    copy.write_text(re.sub(r"(?m)^# (\w+: )", r"\1", text))
    _, more = parsed(command, copy)
    _, before = parsed(command, FOLDER / f"{command}.yaml")
    assert before <= more and len(more) - len(before) == len(re.findall(r"(?m)^# \w+: ", text))


def test_the_sections_of_other_servers_mean_what_they_say(console, asked):
    run(console, "serve", FOLDER / "serve.yaml")
    _, config, settings = asked["serve"]
    assert (config.model, config.max_num_seqs, config.max_num_batched_tokens) == (MODEL, 64, 512)
    assert (config.scheduling_policy, config.max_model_len) == ("hybrid", 8192)
    assert (config.block_size, config.gpu_memory_utilization, config.enable_prefix_caching) == (32, 0.5, True)
    assert (settings.host, settings.port, settings.max_queue, settings.shutdown_timeout_s) == (
        "127.0.0.1", 8000, 1024, 60,
    )  # fmt: skip


def test_the_options_of_quantize_arrive(console, asked):
    run(console, "quantize", FOLDER / "quantize.yaml")
    model, options = asked["quantize"]
    assert (model, options.scheme.method, options.scheme.group_size) == (MODEL, "awq", 128)
    assert (options.calib_samples, options.calib_seqlen, options.eval_tokens) == (16, 512, 4096)
    assert not options.overwrite and len(options.fail_if) == 2


def test_the_options_of_bench_arrive(console, asked):
    run(console, "bench", FOLDER / "bench.yaml")
    options = asked["bench"][0]
    assert (options.config.model, options.workload.dataset, options.workload.prompt_tokens) == (MODEL, "pg19", 5000)
    assert (options.load.max_concurrency, options.config.max_model_len) == (1, 8192)


def test_the_options_of_chat_arrive_except_those_on_the_line(console, asked):
    run(console, "chat", FOLDER / "chat.yaml")
    config = asked["chat"][1]
    assert (config.model, config.max_num_seqs, config.max_model_len) == (MODEL, 1, 4096)
    run(console, "chat", FOLDER / "chat.yaml", "mine", "--max-num-seqs", "2")
    config = asked["chat"][1]
    assert (config.model, config.max_num_seqs, config.max_model_len) == ("mine", 2, 4096)
    given, _ = parsed("chat", FOLDER / "chat.yaml")
    assert (given["temperature"], given["max_tokens"]) == (0.2, 512)
    assert given["system"].startswith("You are")


@pytest.mark.parametrize(
    ("command", "line", "near"),
    [
        ("quantize", "group_sise: 64", "group_size"),
        ("serve", "shutdown_timout: 3", "shutdown_timeout"),
        ("bench", "num_promts: 3", "num_prompts"),
        ("chat", "temprature: 1", "temperature"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_name(console, asked, tmp_path, command, line, near):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {MODEL}\n{line}\n")
    assert run(console, command, path) == ExitCode.USAGE
    assert f"unknown key `{line.partition(':')[0]}`" in console.stderr.getvalue()
    assert f"did you mean `{near}`?" in console.stderr.getvalue()
    assert asked == {}


WORKING = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import needle

def work():
    print(os.getpid(), flush=True)
    signal.pause()

if __name__ == "__main__":
    with needle.workers() as fresh:
        fresh.submit(work).result()
"""


def test_a_worker_of_the_needle_ends_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "working.py"
    script.write_text(WORKING.format(folder=str(FOLDER)))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, script], text=True, **pipes) as parent:
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        assert select.select([worker], [], [], 60)[0], "it is told by a pipe, and ends when it gets a CPU"
    os.close(worker)
