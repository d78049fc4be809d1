"""What can be compared, how it is started, and how it is asked."""

import sys

import pytest

from llmctl.cli.bench.compare.llama_target import LlamaTarget
from llmctl.cli.bench.compare.subjects import LlamaServer, Llmctl, Url, parse_subject, parse_subjects
from llmctl.cli.bench.http_target import make_client
from llmctl.cli.bench.workload import Item
from llmctl.kernels.errors import UsageError


def test_our_own_server_is_started_from_this_installation():
    subject = parse_subject("ours=llmctl:/m/x.gguf:--kv-cache-dtype float16")
    assert subject == Llmctl("ours", "/m/x.gguf", ("--kv-cache-dtype", "float16"))
    command = subject.command(81, 2)
    assert command[:4] == (sys.executable, "-m", "llmctl", "serve") and command[4] == "/m/x.gguf"
    assert " ".join(command).endswith("--port 81 --threads 2 --disable-log-requests --kv-cache-dtype float16")


def test_llama_server_gets_threads_for_both_phases_and_options_last():
    subject = parse_subject("peer=llama-server:/bin/ls:/m/x.gguf:-np 16 --alias 'a b' -ot x:y")
    assert subject == LlamaServer("peer", "/bin/ls", "/m/x.gguf", ("-np", "16", "--alias", "a b", "-ot", "x:y"))
    assert subject.command(81, 3) == (
        "/bin/ls", "-m", "/m/x.gguf", "--host", "127.0.0.1", "--port", "81", "-t", "3", "-tb", "3",
        "-np", "16", "--alias", "a b", "-ot", "x:y",
    )  # fmt: skip


def test_any_url_is_a_subject_that_is_not_started():
    subject = parse_subject("x=url:http://host:8000/v1")
    assert subject == Url("x", "http://host:8000/v1") and subject.command(81, 2) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llmctl:/m", "--subject is `llmctl:/m`"),
        ("x=", "--subject is `x=`"),
        ("=llmctl:m", "--subject is `=llmctl:m`"),
        ("x=vllm:m", "`vllm` is no kind of server"),
        ("x=llama-server:/bin/ls", "lacks a program or a model"),
        ("x=llmctl:m:--a 'b", "No closing quotation"),
        ("x=url:ftp://host", "is no HTTP URL"),
    ],
)
def test_what_is_no_subject_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse_subject(text)


def test_a_comparison_has_two_subjects_of_different_names():
    with pytest.raises(UsageError, match="1 subjects are no comparison"):
        parse_subjects(["x=llmctl:m"])
    with pytest.raises(UsageError, match="two subjects have one name: x, x"):
        parse_subjects(["x=llmctl:m", "x=url:http://h"])


def test_llama_server_is_asked_greedily_without_its_cache_for_an_exact_length():
    body = LlamaTarget("peer", make_client(), "http://x/completion", ()).body(Item((5, 6, 7), 9))
    assert body["prompt"] == [5, 6, 7] and body["n_predict"] == 9
    assert body["cache_prompt"] is False and body["ignore_eos"] is True and body["stream"] is True
    assert (body["samplers"], body["top_k"], body["temperature"]) == (["top_k"], 1, 0.0)
