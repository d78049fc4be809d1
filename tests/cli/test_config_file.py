"""Options from a YAML file: the names that users have, the command line wins, nothing is ignored."""

import pytest

from llmctl.cli import app
from llmctl.cli.commands import serve as command
from llmctl.cli.exits import ExitCode


@pytest.fixture
def served(monkeypatch):
    """The (config, settings) of each server that would have been started."""
    started = []
    monkeypatch.setattr(command, "_run", lambda console, config, settings: started.append((config, settings)))
    return started


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


SEEDS = """
model: org/name
engine:
  max_num_seqs: 32
  max_num_batched_tokens: 8192
scheduler:
  policy: fcfs
  max_context_len: 32K
cache:
  block_size: 256
"""


def test_the_keys_that_users_have_are_understood(console, served, write):
    assert app.run(["serve", "--config", write(SEEDS)], console) == ExitCode.OK
    config, settings = served[0]
    assert (config.model, config.max_num_seqs, config.max_num_batched_tokens) == ("org/name", 32, 8192)
    assert (config.scheduling_policy, config.max_model_len, config.block_size) == ("fcfs", 32768, 256)
    assert settings.names == ("org/name",)


@pytest.mark.parametrize("line", [["mine", "--block-size", "16"], ["--model", "mine", "--block-size", "16"]])
def test_the_command_line_wins_wherever_it_stands(console, served, write, line):
    path = write(SEEDS)
    for arguments in (["serve", "--config", path, *line], ["serve", *line, "--config", path]):
        assert app.run(arguments, console) == ExitCode.OK
        config, _ = served.pop()
        assert (config.model, config.block_size, config.max_num_seqs) == ("mine", 16, 32)


def test_every_option_of_the_command_can_be_in_the_file_flat_or_dotted(console, served, write):
    text = (
        "port: 0\nserver.host: 0.0.0.0\nserved-model-name: [a, b]\nenable_prefix_caching: false\n"
        "engine.threads: 2\nserver:\n  max_queue: 3\n  api_key: k\n"
    )
    assert app.run(["serve", "--config", write(text)], console) == ExitCode.OK
    config, settings = served[0]
    assert (settings.port, settings.host, settings.names, settings.max_queue) == (0, "0.0.0.0", ("a", "b"), 3)
    assert (config.enable_prefix_caching, config.threads, settings.api_keys) == (False, 2, ("k",))


def test_speculation_is_spelt_out_or_written_as_on_the_command_line(console, served, write):
    for text in ("speculative_config:\n  model: small\n", 'engine.speculative-config: \'{"model": "small"}\'\n'):
        assert app.run(["serve", "--config", write(text)], console) == ExitCode.OK
        config, _ = served.pop()
        assert (config.speculative_config.method, config.speculative_config.model) == ("draft_model", "small")


@pytest.mark.parametrize("section", ["", "engine:\n"])
def test_options_that_are_mappings_are_spelt_out_in_a_section_or_not(console, served, write, section):
    text = (
        "tenant_weights:\n  alice: 3\n  bob: 0.5\n"
        "rope_scaling:\n  rope_type: linear\n  factor: 2.0\n"
        "speculative-config:\n  model: small\n"
    )
    indented = "".join(f"  {line}\n" for line in text.splitlines()) if section else text
    assert app.run(["serve", "--config", write(section + indented)], console) == ExitCode.OK
    config, _ = served[0]
    assert config.tenant_weights == {"alice": 3.0, "bob": 0.5}
    assert (config.rope_scaling.rope_type, config.rope_scaling.factor) == ("linear", 2.0)
    assert config.speculative_config.model == "small"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("speculative_config:\n  num_speculative_tokens: 2020-01-01\n", "--speculative-config cannot be", ""),
        ("engine:\n  max_num_seq: 3\n", "unknown key `engine.max_num_seq`", "did you mean `max_num_seqs`?"),
        ("scheduler:\n  polcy: fcfs\n", "unknown key `scheduler.polcy`", "did you mean `policy`?"),
        ("cache:\n  gpu_memory_utilization: 1.5\n", "--gpu-memory-utilization is 1.5", "nine tenths"),
        ("cache:\n  cpu_offload_gb: 4\n", "has no meaning here", "in this machine's memory"),
        ("motor:\n  threads: 2\n", "has a section `motor`", "sections are: engine"),
        ("motor.threads: 2\n", "unknown key `motor.threads`", ""),
        ("engine:\n  max_num_seqs: many\n", "`many` is not a count", ""),
        ("engine:\n  max_num_seqs: true\n", "is True, it must be a text or a number", ""),
        ("engine:\n  max_num_seqs: [1]\n", "it must be a text or a number", ""),
        ("enable_prefix_caching: 3\n", "must be true or false", ""),
        ("scheduler:\n  policy: best\n", "--scheduling-policy is `best`", "choose one of"),
        ("config: other.yaml\n", "unknown key `config`", ""),
        ("model: 3\n", "`model`", "must be a name"),
        ("- a\n- b\n", "is a list", "write `name: value` lines"),
        ("", "holds no options", ""),
        ("a: [", "is not YAML", ""),
    ],
)
def test_what_cannot_work_is_an_error_of_the_file(console, served, write, text, message, hint):
    assert app.run(["serve", "--config", write(text)], console) == ExitCode.USAGE
    shown = console.stderr.getvalue()
    assert message in shown and hint in shown
    assert served == []


def test_a_file_that_is_not_there(console, served, tmp_path):
    assert app.run(["serve", "--config", str(tmp_path / "none.yaml")], console) == ExitCode.USAGE
    assert "cannot read" in console.stderr.getvalue()
