"""`llmctl serve` up to the point where a server would start."""

import shlex

import pytest

from llmctl.cli import app
from llmctl.cli.api.settings import tenant_of
from llmctl.cli.commands import serve as command
from llmctl.cli.exits import ExitCode


@pytest.fixture
def served(monkeypatch):
    """The (config, settings) of each server that would have been started."""
    started = []
    monkeypatch.setattr(command, "_run", lambda console, config, settings: started.append((config, settings)))
    monkeypatch.delenv("LLMCTL_MODEL", raising=False)
    monkeypatch.delenv("LLMCTL_API_KEY", raising=False)
    return started


def test_without_options_it_serves_the_default_model(console, served):
    assert app.run(["serve"], console) == ExitCode.OK
    config, settings = served[0]
    assert (config.model, settings.names) == ("", ("SmolLM2-135M-Instruct",))
    assert (settings.host, settings.port, settings.api_keys) == ("127.0.0.1", 8000, ())


def test_the_environment_names_the_model_and_the_key(console, served, monkeypatch):
    monkeypatch.setenv("LLMCTL_MODEL", "org/name")
    monkeypatch.setenv("LLMCTL_API_KEY", "secret")
    assert app.run(["serve"], console) == ExitCode.OK
    assert (served[0][0].model, served[0][1].api_keys) == ("org/name", ("secret",))
    assert app.run(["serve", "--api-key", "mine"], console) == ExitCode.OK
    assert served[1][1].api_keys == ("mine",)
    assert "mine" not in repr(served[1][1])


def test_flags_of_other_servers_work_where_they_say_what_is_so(console, served):
    line = (
        "serve --model org/name --tokenizer org/name --revision v2 --tensor-parallel-size 1 -pp 1 --device cpu "
        "--trust-remote-code --enable-chunked-prefill --dtype half --max-model-len 4k"
    )
    assert app.run(shlex.split(line), console) == ExitCode.USAGE
    assert "served with its own tokenizer (`org/name@v2`)" in console.stderr.getvalue()
    assert app.run(shlex.split(line.replace("--revision v2", "")), console) == ExitCode.OK
    assert app.run(shlex.split(line.replace("--tokenizer org/name", "")), console) == ExitCode.OK
    assert served[1][0].model == "org/name@v2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-tp 2", "--tensor-parallel-size is 2"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size is 2"),
        ("--no-enable-chunked-prefill", "prompts are always cut into chunks"),
        ("--gpu-memory-utilization 9", "--gpu-memory-utilization is 9, it must be from 0 to 1"),
        ("--gpu-memory-utilization most", "`most` is not a share"),
        ("--quantization awq", "`--quantization` has no meaning here"),
        ("--enable-lora", "adapters are not supported"),
        ('--speculative-config \'{"method": "eagle"}\'', "choose one of: ngram, draft_model, none"),
        ("--speculative-config '{\"num_tokens\": 4}'", "did you mean `num_speculative_tokens`?"),
        ("--speculative-config x", "neither ngram nor none nor JSON"),
        ("--swap-space -1", "--swap-space is -1 GiB, it must be from 0"),
        ("--swap-space much", "`much` is not a count"),
        ("--swap-space 4 --no-enable-prefix-caching", "no prefix cache"),
        ("--preemption-mode swap", "there is no swap space"),
        ("--preemption-mode maybe", "choose one of: auto, swap, recompute"),
        ("--tokenizer other", "own tokenizer"),
        ("--revision v2", "only a model named by its hub id has revisions"),
        ("--port 70000", "must be from 0 to 65535"),
        ("--port x", "valid integer"),
        ("--ssl-keyfile k", "needs a key and a certificate"),
        ("--shutdown-timeout -1", "must be 0 or more"),
        ("--shutdown-timeout nan", "must be 0 or more"),
        ("--generation-config x", "choose one of: auto, vllm, openai"),
        ("--api-key ''", "an API key is empty"),
        ("--chat-template /no/such/file", "cannot read the chat template"),
        ("--max-queue -1", "`-1` is not a count"),
        ("--max-queue-per-tenant alice", "is no count, nor a name with one"),
        ("--max-queue-per-tenant 8,9", "gives all tenants two limits"),
        ("--max-queue-per-tenant a=1,a=2", "gives tenant `a` two limits"),
        ("--api-key k --max-queue-per-tenant alice=2", "--max-queue-per-tenant names `alice`"),
        ("--scheduling-policy best", "choose one of"),
        ("--portt 1", "did you mean `--port`?"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(console, served, line, message):
    assert app.run(["serve", *shlex.split(line)], console) == ExitCode.USAGE
    assert message in console.stderr.getvalue()
    assert served == []


def test_limits_of_tenants_are_one_for_all_and_others_by_name(console, served):
    line = ["serve", "--max-queue-per-tenant", "8, alice=2k, a=b=0"]
    assert app.run(line, console) == ExitCode.OK
    limits = served[0][1].tenant_queues
    assert [limits.of(name) for name in ("bob", "alice", "a=b", "")] == [8, 2000, 0, 8]


def test_a_certificate_that_cannot_be_used_and_a_template_that_does_not_compile(console, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("{% if %}")
    line = ["serve", "--port", "0"]
    assert app.run([*line, "--chat-template", str(broken)], console) == ExitCode.USAGE
    assert "does not compile" in console.stderr.getvalue()
    assert app.run([*line, "--ssl-keyfile", str(broken), "--ssl-certfile", str(broken)], console) == ExitCode.USAGE
    assert "cannot use" in console.stderr.getvalue()


def test_the_command_that_is_printed_does_the_same_and_shows_no_key(console, served, tmp_path, make_console):
    file = tmp_path / "with space.yaml"
    file.write_text("engine:\n  max_num_seqs: 2k\nserver:\n  api_key: secret\n")
    line = [
        "serve", "a model", "--config", str(file), "--no-enable-prefix-caching", "-c", "4K", "--disable-log-requests",
        "--served-model-name", "x", "--served-model-name", "y", "--api-key", "hidden", "--shutdown-timeout", "1.5",
    ]  # fmt: skip
    assert app.run([*line, "--print-command"], console) == ExitCode.OK
    printed = console.stdout.getvalue()
    assert served == [] and "hidden" not in printed and "secret" not in printed
    assert app.run(line, make_console()) == ExitCode.OK
    words = shlex.split(printed)
    assert words[:3] == ["llmctl", "serve", "a model"]
    assert app.run(words[1:], make_console()) == ExitCode.OK
    (config, settings), (again, printed_settings) = served
    assert again == config and config.max_num_seqs == 2000
    assert printed_settings.names == settings.names == ("x", "y")
    assert printed_settings.shutdown_timeout_s == 1.5 and not printed_settings.log_requests


def test_the_model_is_named_in_the_command_even_if_it_is_the_default(console, served):
    assert app.run(["serve", "--print-command"], console) == ExitCode.OK
    assert console.stdout.getvalue() == "llmctl serve SmolLM2-135M-Instruct\n"


def test_with_api_keys_a_weight_is_for_one_of_them_and_the_error_says_what_they_are_called(console, served):
    assert app.run(["serve", "--api-key", "k", "--tenant-weights", "alice=2"], console) == ExitCode.USAGE
    name = tenant_of("k")
    assert f"the keys given are, in their order: {name}" in console.stderr.getvalue()
    assert app.run(["serve", "--api-key", "k", "--tenant-weights", f"{name}=2"], console) == ExitCode.OK
    assert app.run(["serve", "--tenant-weights", "alice=2"], console) == ExitCode.OK
