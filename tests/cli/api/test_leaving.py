"""Clients that leave: at any phase their sequences end within a step, and nobody else notices.

The engine is made to stand still while a client leaves, so that the phase is certain and the steps can be counted.
"""

import concurrent.futures
import contextlib
import http.client
import json
import re
import signal

import pytest

from tests.cli.api.live import CHAT, ask, eventually

SAMPLES = pytest.mark.parametrize("samples", [1, 4])


def leave(server, connection):
    """Close the connection and wait until the server has noticed."""
    gone = server.stderr.count("status=499")
    connection.close()
    eventually(lambda: server.stderr.count("status=499") > gone, "a line for the client that left")


def assert_all_blocks_are_back(metrics):
    assert metrics["kv_cache_usage_perc"] == 0
    assert metrics["kv_blocks_free"] + metrics["kv_blocks_cached"] == metrics["kv_blocks"]


@pytest.mark.parametrize("stream", [False, True])
@SAMPLES
def test_a_client_that_leaves_before_its_first_token_costs_at_most_a_step(server, stream, samples):
    before = server.idle()
    with server.frozen_engine():
        connection = ask(server, "x" * 150, stream=stream, n=samples, max_tokens=80)
        eventually(lambda: server.health()["open"] == samples)
        leave(server, connection)
        assert server.health()["open"] == 0
    after = server.idle()
    assert after["engine_steps_total"] - before["engine_steps_total"] <= 1
    assert_all_blocks_are_back(after)


@SAMPLES
def test_a_client_that_leaves_in_mid_stream_ends_its_answer(server, samples):
    total = 100 * samples
    for _ in range(20):  # until the engine stands still well before the answer is complete
        before = server.idle()
        connection = ask(server, "hello", stream=True, n=samples, max_tokens=100)
        response = connection.getresponse()
        response.readline()
        with server.frozen_engine():
            if server.health()["open"] == 0:
                continue
            response.close()
            leave(server, connection)
        after = server.idle()
        sent = int(re.findall(r"status=499 .*completion_tokens=(\d+)", server.stderr)[-1])
        generated = after["generation_tokens_total"] - before["generation_tokens_total"]
        assert 0 < sent <= generated <= total  # some were on their way between the processes
        assert_all_blocks_are_back(after)
        if generated < total - 2 * samples:
            return
    raise AssertionError(f"every answer ran to its end: {generated:g} of {total} tokens, {sent} of them sent")


def test_a_client_that_leaves_the_queue_never_runs(start):
    server = start("--max-num-seqs", "1")
    alone = json.load(ask(server, "first").getresponse())["choices"][0]["message"]["content"]
    steps = server.idle()["engine_steps_total"]
    json.load(ask(server, "first").getresponse())
    steps = server.idle()["engine_steps_total"] - steps
    before = server.idle()
    with server.frozen_engine():
        running = ask(server, "first")
        eventually(lambda: server.health()["open"] == 1)
        waiting = ask(server, "second", n=3)
        eventually(lambda: server.health()["open"] == 4)
        leave(server, waiting)
    assert json.load(running.getresponse())["choices"][0]["message"]["content"] == alone
    after = server.idle()
    assert after["engine_steps_total"] - before["engine_steps_total"] == steps
    assert_all_blocks_are_back(after)


def test_of_many_clients_half_leave_and_the_others_get_what_they_get_alone(server):
    client = server.openai()

    def stream(number):
        return client.completions.create(
            model="tiny", prompt=f"client {number % 8}", seed=number, max_tokens=60, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip

    def read(number):
        return "".join(chunk.choices[0].text for chunk in stream(number))

    def run(number):
        if number % 2 == 0:
            return read(number)
        with contextlib.closing(stream(number)) as chunks:
            for _ in range(number % 5 + 1):
                next(chunks, None)
        return None

    alone = {number: read(number) for number in range(0, 64, 2)}
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        together = dict(enumerate(pool.map(run, range(64))))
    assert {number: text for number, text in together.items() if text is not None} == alone
    assert_all_blocks_are_back(server.idle())
    assert server.health()["open"] == 0


def test_a_client_that_leaves_in_the_middle_of_its_body_is_one_line(server):
    lines, before = server.stderr.count("\n"), server.idle()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.putrequest("POST", CHAT)
    connection.putheader("content-length", "1000")
    connection.endheaders(b'{"messages"')
    leave(server, connection)
    assert server.stderr.count("\n") == lines + 1 and "Traceback" not in server.stderr
    counted = re.findall(r'http_requests_total\{.*status="(\d+)"\}', server.http().get("/metrics").text)
    assert "499" in counted and "500" not in counted
    assert server.idle()["engine_steps_total"] == before["engine_steps_total"]


def test_a_storm_of_leaving_clients_takes_no_place_from_those_that_stay(start):
    server = start("--max-num-seqs", "1", "--max-queue", "3")
    before = server.idle()
    server.signal(signal.SIGSTOP)  # so that it hears of all of them at once
    gone = [ask(server, "x", max_tokens=1) for _ in range(100)]
    staying = [ask(server, "y", max_tokens=1) for _ in range(4)]
    for connection in gone:
        connection.close()
    server.signal(signal.SIGCONT)
    assert [connection.getresponse().status for connection in staying] == [200] * 4
    eventually(lambda: server.stderr.count("status=499") == 100, "a line for each client that left")
    after = server.idle()
    assert "status=429" not in server.stderr and server.health()["open"] == 0
    prompts = re.findall(r"status=200 .*prompt_tokens=(\d+)", server.stderr)
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] <= sum(map(int, prompts))


def test_a_full_queue_says_when_to_come_again_and_whose_it_is(start):
    server = start("--max-num-seqs", "1", "--max-queue", "2", "--max-queue-per-tenant", "1")
    hello = {"messages": [{"role": "user", "content": "three"}]}
    with server.frozen_engine(), server.http() as http:
        connections = [ask(server, text, user="bob") for text in ("one", "two")]
        eventually(lambda: server.health()["open"] == 2)
        refused = http.post(CHAT, json={**hello, "user": "bob"})
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "tenant_queue_full"
        assert refused.json()["error"]["message"] == (
            "the queue of tenant `bob` is full: 1 sequences wait, at most 1 may"
        )
        assert int(refused.headers["retry-after"]) >= 1
        connections.append(ask(server, "four", user="alice"))
        eventually(lambda: server.health()["open"] == 3)
        refused = http.post(CHAT, json={**hello, "user": "carol"})
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        counted = re.findall(r'requests_refused_total\{.*reason="(\w+)"\} (\S+)', http.get("/metrics").text)
        assert sorted(counted) == [("queue_full", "1.0"), ("tenant_queue_full", "1.0")]
    assert [connection.getresponse().status for connection in connections] == [200] * 3
