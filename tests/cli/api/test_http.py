"""What raw HTTP gets: right statuses, OpenAI's error bodies, nothing ignored and nothing guessed."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .live import CHAT, LONG, eventually

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def http(server):
    with server.http() as http:
        yield http


def refusal(response, status):
    """The error of a response, after what every error must have was checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"] and sorted(body["error"]) == ["code", "message", "param", "type"]
    assert body["error"]["message"] and body["error"]["type"]
    assert response.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"not json", b'{"messages": "\xff"}', b"[" * 100_000, b'{"n": NaN}'])
def test_a_body_that_is_no_json_is_a_bad_request(http, body):
    assert refusal(http.post(CHAT, content=body), 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 1000}, "n"),
        ({"n": 129}, "n"),
        ({"n": 0}, "n"),
        ({"n": -5}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 1.5}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 1 << 70}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"priority": 1 << 40}, "priority"),
        ({"max_wait": -1}, "max_wait"),
        ({"stream": True, "stream_options": {"include_usges": True}}, "stream_options.include_usges"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"guided_json": {}}, "guided_json"),
        ({"temprature": 1}, "temprature"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": None}, "messages"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_cannot_work_is_named(http, change, param, stream):
    error = refusal(http.post(CHAT, json={"messages": HELLO, "stream": stream, **change}), 400)
    assert error["param"] == param


def test_samples_that_no_request_may_have_are_refused_in_one_wording_however_many(http):
    for number in (0, 129, 10**9, 10**30):
        error = refusal(http.post(CHAT, json={"messages": HELLO, "n": number}), 400)
        assert error["message"] == f"`n` is {number}, it must be from 1 to 128"


def test_options_of_a_stream_need_a_stream(http):
    body = {"messages": HELLO, "stream_options": {"include_usage": True}}
    assert refusal(http.post(CHAT, json=body), 400)["param"] == "stream_options"


def test_a_misspelt_field_names_the_nearest(http):
    error = refusal(http.post(CHAT, json={"messages": HELLO, "temprature": 1}), 400)
    assert "did you mean `temperature`?" in error["message"]


def test_a_missing_field_is_named(http):
    assert refusal(http.post(CHAT, json={"n": 1}), 400)["param"] == "messages"
    assert refusal(http.post("/v1/completions", json={"n": 1}), 400)["param"] == "prompt"


def test_fields_that_ask_for_nothing_are_accepted(http):
    neutral = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
        "prompt_cache_key": "k", "parallel_tool_calls": True, "tools": [], "tool_choice": "none", "functions": None,
        "response_format": {"type": "text"}, "modalities": ["text"], "reasoning_effort": None, "n": None, "stop": None,
        "logit_bias": None, "stream_options": None, "temperature": 0, "max_completion_tokens": 2,
    }  # fmt: skip
    assert http.post(CHAT, json={"messages": HELLO, **neutral}).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": []},
        {"prompt": ["a", 1]},
        {"prompt": [[1], "a"]},
        {"prompt": [[]]},
        {"prompt": ""},
        {"prompt": [5000]},
        {"prompt": [[1], [5000]]},
        {"prompt": [10**30]},
        {"prompt": [-1]},
        {"prompt": "x", "logprobs": 21},
        {"prompt": "x", "suffix": "y"},
        {"prompt": "x", "best_of": 3},
        {"prompt": "x", "best_of": True},
        {"prompt": 5},
    ],
)
def test_a_prompt_that_cannot_work_is_a_bad_request(http, change):
    error = refusal(http.post("/v1/completions", json=change), 400)
    assert error["param"] == next(name for name in ("suffix", "best_of", "logprobs", "prompt") if name in change)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["hello there", [40, 41, 42, 43, 44], ["one", "other"], [[50, 51, 52], [60, 61]]])
def test_an_echo_with_logprobs_has_those_of_the_prompt_as_evaluations_read_them(http, prompt, max_tokens):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    assert len(choices) == len(prompts)
    for given, choice in zip(prompts, choices):
        logprobs = choice["logprobs"]
        count = len(given)  # the tiny tokenizer has a token for each byte
        assert {len(column) for column in logprobs.values()} == {count + max_tokens}
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        shown = logprobs["tokens"][:count]  # what is generated may be a part of a character
        assert "".join(shown) == choice["text"][:count]
        assert logprobs["text_offset"] == list(range(count + max_tokens))
        for own, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:]):
            assert own < 0 and own in top.values() and 1 <= len(top) <= 2  # the likeliest, and the token's own
        assert choice["text"].startswith(given if isinstance(given, str) else choice["text"][:count])
        assert choice["finish_reason"] == "length"


def test_an_echo_with_logprobs_streams_what_comes_whole(http):
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": True, "n": 2}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    columns = [{name: [] for name in choices[0]["logprobs"]} for _ in choices]
    for line in http.post("/v1/completions", json={**body, "stream": True}).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                for name, column in (choice["logprobs"] or {}).items():
                    columns[choice["index"]][name] += column
    assert columns == [choice["logprobs"] for choice in choices]


def test_beams_come_best_first_whole_and_streamed_through_both_endpoints(http):
    beams = {"use_beam_search": True, "best_of": 4, "n": 2, "length_penalty": 0.5, "early_stopping": "never"}
    body = {"prompt": "hello", "max_tokens": 8, "logprobs": 0, **beams}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
    scores = [total / len(choice["logprobs"]["tokens"]) ** 0.5 for total, choice in zip(sums, choices)]
    assert len(choices) == 2 and scores == sorted(scores, reverse=True)
    texts = ["", ""]
    for line in http.post("/v1/completions", json={**body, "stream": True}).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in choices]
    wide = {"messages": HELLO, "max_tokens": 5, "n": 3, "use_beam_search": True}
    answers = http.post(CHAT, json=wide).json()["choices"]
    assert len({answer["message"]["content"] for answer in answers}) == 3


@pytest.mark.parametrize(
    ("change", "param"),
    [({"temperature": 0.5}, "temperature"), ({"best_of": 1}, "best_of"), ({"early_stopping": "soon"}, "early_stopping"),
     ({"stop": "x"}, "stop"), ({"top_p": 0.5}, "top_p")],
)  # fmt: skip
def test_a_field_that_a_beam_search_cannot_honour_is_a_bad_request(http, change, param):
    body = {"prompt": "x", "n": 2, "use_beam_search": True, **change}
    assert refusal(http.post("/v1/completions", json=body), 400)["param"] == param


def test_more_sequences_than_the_server_ever_holds_are_refused(http):
    prompts = ["x"] * 1200
    assert "at most 1088" in refusal(http.post("/v1/completions", json={"prompt": prompts}), 400)["message"]


def test_a_body_that_is_too_long_is_refused(http):
    body = json.dumps({"messages": [{"role": "user", "content": "x" * (33 << 20)}]})
    assert "32 MiB" in refusal(http.post(CHAT, content=body), 413)["message"]


@pytest.mark.parametrize("prompt", ["a " * (1 << 22), [1] * (1 << 22), ["a", "b" * (1 << 23)]])
def test_a_prompt_far_beyond_the_context_is_refused_without_being_encoded(http, prompt):
    error = refusal(http.post("/v1/completions", json={"prompt": prompt}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_a_conversation_or_a_text_to_tokenize_far_beyond_the_context_is_refused(http):
    text = "a " * (1 << 22)
    error = refusal(http.post(CHAT, json={"messages": [{"role": "user", "content": text}]}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert refusal(http.post("/tokenize", json={"prompt": text}), 400)["code"] == "context_length_exceeded"


def test_a_lone_surrogate_is_a_bad_request(http):
    body = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    assert refusal(http.post(CHAT, content=body), 400)


def test_unknown_paths_and_methods_have_error_bodies_too(http):
    assert refusal(http.get("/v1/nothing"), 404)["code"] == "not_found"
    response = http.get(CHAT)
    refusal(response, 405)
    assert response.headers["allow"] == "POST"


def test_a_stream_is_framed_as_clients_expect(http):
    asked = {"messages": HELLO, "max_tokens": 3, "ignore_eos": True, "stream": True}
    with http.stream("POST", CHAT, json=asked) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in response.headers
        events = "".join(response.iter_text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert chunks[-1]["choices"][0]["delta"] == {} and chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks)
    asked["stream_options"] = {"include_usage": True}
    events = http.post(CHAT, json=asked).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3


def test_text_goes_to_tokens_and_back(http):
    answer = http.post("/tokenize", json={"prompt": "grün 🙂", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == len("grün 🙂".encode())
    assert answer["max_model_len"] == 256
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "grün 🙂"}
    chat = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": chat}).json()["prompt"].endswith("<|im_start|>assistant\n")
    counted = http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    assert counted == len(chat)
    assert refusal(http.post("/detokenize", json={"tokens": [5000]}), 400)["param"] == "tokens"
    assert refusal(http.post("/tokenize", json={"prompt": "x", "messages": HELLO}), 400)


def test_health_version_metrics_and_the_document_of_the_api(http, server):
    assert http.get("/health").json()["status"] == "ok"
    assert http.get("/version").json()["system_fingerprint"].startswith("llmctl-")
    before = server.metrics()
    http.post(CHAT, json={"messages": HELLO, "max_tokens": 5, "ignore_eos": True})
    after = server.metrics()
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 5
    assert after["time_to_first_token_seconds_count"] - before["time_to_first_token_seconds_count"] == 1
    assert after["inter_token_latency_seconds_count"] - before["inter_token_latency_seconds_count"] == 4
    assert 0 < after["scheduler_seconds_total"] < after["step_seconds_total"]
    assert after["scheduler_share"] == pytest.approx(after["scheduler_seconds_total"] / after["step_seconds_total"])
    document = http.get("/openapi.json").json()
    assert "temperature" in document["components"]["schemas"]["ChatRequest"]["properties"]
    assert CHAT in document["paths"]


def test_the_log_has_a_line_per_request_without_its_text(http, server):
    asked = {"messages": [{"role": "user", "content": "s3cret"}], "user": "a b", "max_tokens": 2, "ignore_eos": True}
    answer = http.post(CHAT, json=asked)
    line = server.logged(f"id={answer.headers['x-request-id']} .*\n").group()
    assert "endpoint=/v1/chat/completions status=200" in line
    assert "completion_tokens=2 finish=length:1" in line and 'tenant="a b"' in line
    assert "s3cret" not in server.stderr


def test_a_request_that_can_wait_no_time_runs_where_nobody_waits(http):
    asked = {"messages": HELLO, "max_tokens": 2, "max_wait": 0}
    assert http.post(CHAT, json=asked).json()["usage"]["completion_tokens"] > 0


def test_a_request_whose_turn_does_not_come_in_time_is_told_when_to_try_again(start):
    server = start("--max-num-seqs", "1")
    with server.http() as http, ThreadPoolExecutor(28) as pool:

        def ask(changes):
            return http.post(CHAT, json={"messages": HELLO, **LONG, **changes})

        patient = [pool.submit(ask, {}) for _ in range(20)]
        eventually(lambda: server.health()["open"] > 5)
        hasty = [pool.submit(ask, {"max_wait": 0, "stream": number % 2 == 0}).result() for number in range(8)]
        assert {answer.status_code for answer in hasty} <= {200, 429}
        refused = [answer for answer in hasty if answer.status_code == 429]
        assert refused and all(refusal(answer, 429)["code"] == "max_wait_exceeded" for answer in refused)
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert all(future.result().status_code == 200 for future in patient)


def test_states_of_requests_are_shown_with_a_key_where_they_are_asked_for_at_the_start(http, server_with_keys):
    assert http.get("/debug/requests").status_code == 404
    key = {"authorization": "Bearer one"}
    with server_with_keys.http() as other:
        assert refusal(other.get("/debug/requests"), 401)["code"] == "invalid_api_key"
        answer = other.post(CHAT, json={"messages": HELLO, "max_tokens": 3, "ignore_eos": True}, headers=key)
        (state,) = [
            state
            for state in other.get("/debug/requests", headers=key).json()["sequences"]
            if state["request_id"].startswith(answer.headers["x-request-id"])
        ]
    assert (state["phase"], state["finish"], state["generated_tokens"]) == ("finished", "length", 3)
    assert [change["phase"] for change in state["trace"]] == ["waiting", "running", "finished"]
    assert state["tenant"].startswith("key-") and "hello" not in str(state)


@pytest.fixture(scope="module")
def server_with_keys(start):
    keys = ("--api-key", "one", "--api-key", "two")
    return start(*keys, "--allowed-origins", "https://page.example", "--enable-debug-requests")


def test_a_key_is_asked_for_and_never_shown(server_with_keys):
    server = server_with_keys
    with server.http() as http:
        response = http.get("/v1/models")
        assert refusal(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        wrong = {"authorization": "Bearer three"}
        assert refusal(http.post(CHAT, json={"messages": HELLO}, headers=wrong), 401)["code"] == "invalid_api_key"
        assert refusal(http.post("/tokenize", json={"prompt": "x"}), 401)
        for key in ("one", "two"):
            assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert http.get("/health").status_code == http.get("/metrics").status_code == 200
        preflight = {"origin": "https://page.example", "access-control-request-method": "POST"}
        assert http.options(CHAT, headers=preflight).headers["access-control-allow-origin"] == "https://page.example"
    assert "three" not in server.stderr and "one" not in server.stderr.replace("none", "")


def test_a_chat_template_of_ones_own_takes_the_place_of_the_models(start, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}{{ mood }}")
    server = start("--chat-template", str(template), "--root-path", "/behind")
    with server.http() as http:
        asked = {"messages": HELLO, "chat_template_kwargs": {"mood": "!"}}
        tokens = http.post("/tokenize", json=asked).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "[hello]!"
        assert http.post(CHAT, json={**asked, "max_tokens": 1}).json()["usage"]["prompt_tokens"] == len("[hello]!")
    assert "Warning" not in server.stderr


def test_a_key_from_the_environment_and_a_unix_socket(start, tmp_path):
    path = tmp_path / "llmctl.sock"
    server = start("--uds", str(path), "--disable-log-requests", "--disable-metrics", LLMCTL_API_KEY="secret")
    assert server.url == f"unix:{path}"
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://llmctl", timeout=300) as http:
        assert http.get("/health").json()["status"] == "ok"
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert http.get("/metrics").status_code == 404
    server.signal()
    assert server.end()[0] == 0
    assert not path.exists()
    assert "endpoint=" not in server.stderr
