"""A server from its start to its end: loading, draining, and an engine that stands still or is killed."""

import concurrent.futures
import contextlib
import json
import signal
import socket

import httpx
import openai
import psutil
import pytest

from tests.cli.api.live import CHAT, Server, ask, eventually

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def test_a_port_in_use_is_told_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, stderr = Server("/no/such/model", "--port", port).end()
    assert code == 2
    assert f"port {port} on 127.0.0.1 is in use" in stderr and "no/such/model" not in stderr


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    code, stderr = Server(str(tmp_path), "--port", "0").end()
    assert code == 3
    assert stderr.startswith("error: ") and "Traceback" not in stderr


@pytest.mark.parametrize("signals", [1, 2])
def test_a_server_that_loads_says_so_and_can_be_ended(start, tmp_path, signals):
    path = tmp_path / "socket"
    server = start("--uds", str(path), wait=False)
    engine = eventually(lambda: loading_engine(server))
    engine.suspend()
    eventually(lambda: listens(path))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://llmctl", timeout=300) as http:
        health = http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        refused = http.post(CHAT, json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert refused.headers["retry-after"]
        assert http.get("/v1/models").status_code == 503
        assert http.get("/metrics").status_code == 200
    for _ in range(signals):
        server.signal(signal.SIGTERM)
    engine.resume()
    code, stderr = server.end()
    assert code == 0 and "Traceback" not in stderr
    assert not path.exists()
    assert not engine.is_running()


def listens(path):
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def loading_engine(server):
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):
            if "llmctl.engine.worker" in child.cmdline():
                return child
    return None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_answers_finish_and_refuses_new_ones(start, number):
    server = start()
    expected = json.load(ask(server, "hello").getresponse())["choices"]
    with server.frozen_engine(), server.http() as http:
        connection = ask(server, "hello")
        eventually(lambda: server.health()["open"] == 1)
        server.signal(number)
        eventually(lambda: server.health()["status"] == "draining")
        refused = http.post(CHAT, json=HELLO)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["retry-after"]
        assert http.get("/health").status_code == 503
    assert json.load(connection.getresponse())["choices"] == expected
    code, stderr = server.end()
    assert code == (130 if number == signal.SIGINT else 0)
    assert "Traceback" not in stderr and "ERROR" not in stderr


def test_a_swap_space_that_cannot_be_ends_the_server_before_it_serves(start, tmp_path):
    (tmp_path / "swap").write_text("a file where the folder would be")
    server = start("--swap-space", "0.01", wait=False, LLMCTL_CACHE=str(tmp_path))
    code, stderr = server.end()
    assert code == 5 and server.process.stdout.read() == ""
    assert "swap` is no folder" in stderr and "--swap-space 0" in stderr and "Traceback" not in stderr


def test_a_signal_under_swap_lets_open_answers_finish_and_leaves_no_file(start, tmp_path):
    server = start("--swap-space", "0.01", LLMCTL_CACHE=str(tmp_path))
    texts = [f"{letter} story of some length, please" for letter in "abcdefgh"]

    def asked():
        return [ask(server, text, n=2) for text in texts]  # twice what the pool holds

    expected = [json.load(each.getresponse())["choices"] for each in asked()]
    assert server.idle()["swapped_out_bytes_total"] > 0
    with server.frozen_engine():
        connections = asked()
        eventually(lambda: server.health()["open"] == 2 * len(texts))
        server.signal(signal.SIGTERM)
        eventually(lambda: server.health()["status"] == "draining")
    assert [json.load(each.getresponse())["choices"] for each in connections] == expected
    code, stderr = server.end()
    assert code == 0 and "Traceback" not in stderr and "ERROR" not in stderr
    assert list((tmp_path / "swap").iterdir()) == []


def test_a_second_signal_under_swap_quits_at_once_and_leaves_no_file(start, tmp_path):
    server = start("--swap-space", "0.01", LLMCTL_CACHE=str(tmp_path))
    engine = server.engine
    with server.frozen_engine():
        connections = [ask(server, "hello", n=2) for _ in range(8)]
        eventually(lambda: server.health()["open"] == 16)
        server.signal(signal.SIGINT)
        server.logged("quits at once")
        server.signal(signal.SIGINT)
        code, stderr = server.end()
    for each in connections:
        each.close()
    assert code == 130 and "Traceback" not in stderr
    assert not engine.is_running() and list((tmp_path / "swap").iterdir()) == []


def test_what_does_not_finish_in_time_is_told_so(start):
    server = start("--shutdown-timeout", "0")
    engine = server.engine
    with server.frozen_engine():
        connection = ask(server, "hello")
        eventually(lambda: server.health()["open"] == 1)
        server.signal()
        server.logged("did not finish within 0 s")
    response = connection.getresponse()
    assert response.status == 503 and json.load(response)["error"]["code"] == "shutting_down"
    code, stderr = server.end()
    assert code == 0 and "error=shutting_down" in stderr and "engine_dead" not in stderr
    assert not engine.is_running()


def test_a_second_signal_quits_at_once(start):
    server = start()
    engine = server.engine
    with server.frozen_engine():
        connection = ask(server, "hello")
        eventually(lambda: server.health()["open"] == 1)
        server.signal(signal.SIGINT)
        server.logged("quits at once")
        server.signal(signal.SIGINT)
        code, stderr = server.end()
    connection.close()
    assert code == 130 and "Traceback" not in stderr
    assert not engine.is_running()


def test_a_killed_engine_is_told_to_open_requests_and_ends_the_server(start):
    server = start()
    client = server.openai()
    stream = client.chat.completions.create(model="tiny", stream=True, n=64, max_tokens=200,
                                            extra_body={"ignore_eos": True}, **HELLO)  # fmt: skip
    next(stream)
    with server.frozen_engine() as engine:
        unanswered = ask(server, "hello")
        eventually(lambda: server.health()["open"] == 65)
        engine.kill()
        with pytest.raises(openai.APIError) as failed:
            list(stream)
        assert failed.value.code == "engine_dead" and "exit code -9" in failed.value.message
        response = unanswered.getresponse()
        assert response.status == 503 and json.load(response)["error"]["code"] == "engine_dead"
    server.logged(r"ERROR .*exit code -9 \(SIGKILL\); the server ends")
    code, stderr = server.end()
    assert code == 6 and "Traceback" not in stderr
    told = " ".join(stderr[stderr.rindex("error: ") :].split())
    assert told.startswith("error: the engine process ended with exit code -9 (SIGKILL)") and "more memory" in told


def test_a_stream_that_does_not_finish_in_time_ends_with_an_event_that_says_so(start):
    server = start("--shutdown-timeout", "0")
    stream = server.openai().chat.completions.create(model="tiny", stream=True, n=64, max_tokens=200,
                                                     extra_body={"ignore_eos": True}, **HELLO)  # fmt: skip
    next(stream)
    with server.frozen_engine():
        server.signal()
        server.logged("did not finish within 0 s")
    with pytest.raises(openai.APIError) as failed:
        list(stream)
    assert failed.value.code == "shutting_down"
    assert "error=shutting_down" in server.end()[1]


def test_an_engine_that_stands_still_is_told_by_its_health(start):
    server = start("--stuck-after", "0.2")
    with server.http() as http:
        assert http.get("/health").status_code == 200
        with server.frozen_engine(), concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(http.post, CHAT, json={**HELLO, "max_tokens": 3})
            stuck = eventually(lambda: (h := server.health())["status"] == "stuck" and h)
            assert stuck["last_step_age_s"] > 0.2
            server.engine.resume()
            assert answer.result().status_code == 200
        eventually(lambda: http.get("/health").status_code == 200)
