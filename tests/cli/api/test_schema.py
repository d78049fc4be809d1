"""Bodies of requests that cannot be are a 400 that names the field."""

import pytest

from llmctl.cli.api.errors import ApiError
from llmctl.cli.api.schema import CompletionRequest, decode


@pytest.mark.parametrize("priority", ["2147483648", "-2147483649", "1" + "0" * 30, "1.5", "true", '"1"'])
def test_a_priority_that_no_record_can_carry_is_refused(priority):
    with pytest.raises(ApiError) as caught:
        decode(b'{"prompt": "x", "priority": %s}' % priority.encode(), CompletionRequest)
    assert (caught.value.status, caught.value.param) == (400, "priority")


@pytest.mark.parametrize("wait", ["1e400", "NaN", '"2"', "true", "[1]"])
def test_a_time_to_wait_that_is_no_number_is_refused(wait):
    with pytest.raises(ApiError) as caught:
        decode(b'{"prompt": "x", "max_wait": %s}' % wait.encode(), CompletionRequest)
    assert caught.value.status == 400


@pytest.mark.parametrize("text", [r"\ud800", r"so \uD83D", r"\ud83dabc"])
def test_half_a_surrogate_pair_is_told_from_a_body_that_is_cut_short(text):
    body = b'{"prompt": "%s"}' % text.encode()
    with pytest.raises(ApiError, match="half a surrogate pair"):
        decode(body, CompletionRequest)
    with pytest.raises(ApiError, match="truncated"):
        decode(body[:-1], CompletionRequest)
    assert decode(rb'{"prompt": "\ud83d\ude00"}', CompletionRequest).prompt == "\N{GRINNING FACE}"
