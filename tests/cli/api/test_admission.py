"""The queue's limit, what Retry-After says, and draining."""

import asyncio
import contextlib

import pytest

from llmctl.cli.api.admission import Admission
from llmctl.cli.api.errors import ApiError
from llmctl.cli.api.settings import TenantLimits


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def refused(admission, sequences):
    with pytest.raises(ApiError) as caught, admission.admit(sequences):
        pass
    return caught.value


def test_places_are_counted_in_sequences_and_given_back():
    admission = Admission(running=2, waiting=1)
    with admission.admit(2):
        assert admission.open == 2
        error = refused(admission, 2)
        assert (error.status, error.code) == (429, "queue_full")
        with admission.admit(1):
            assert admission.open == 3
    with contextlib.suppress(KeyError), admission.admit(3):
        raise KeyError
    assert admission.open == 0


def test_what_never_fits_is_no_matter_of_time():
    error = refused(Admission(running=2, waiting=1), 4)
    assert (error.status, error.retry_s) == (400, None)


def test_a_request_that_cannot_wait_for_the_backlog_is_refused_at_once():
    clock = Clock()
    admission = Admission(running=2, waiting=9, clock=clock)
    with admission.admit(1):
        clock.now += 4
    with admission.admit(4):
        with pytest.raises(ApiError) as caught, admission.admit(1, 5.9):  # 3 are ahead of 2 places, 4 s each
            pass
        assert (caught.value.status, caught.value.code, caught.value.retry_s) == (429, "max_wait_exceeded", 8)
        assert "takes about 6.0 s, the request can wait 5.9 s" in caught.value.message
        with admission.admit(1, 6.0):
            assert admission.open == 5
    with admission.admit(2, 0.0):
        assert admission.open == 2


def test_retry_after_is_the_time_that_the_backlog_takes():
    clock = Clock()
    admission = Admission(running=2, waiting=2, clock=clock)
    with admission.admit(1):
        clock.now += 30
    with admission.admit(4):
        assert refused(admission, 1).retry_s == 60  # four of 30 s each, two at a time


def test_an_answer_that_failed_says_nothing_about_how_long_answers_take():
    clock = Clock()
    admission = Admission(running=1, waiting=0, clock=clock)
    with contextlib.suppress(KeyError), admission.admit(1):
        clock.now += 1000
        raise KeyError
    with admission.admit(1):
        assert refused(admission, 1).retry_s < 10


def test_draining_waits_for_who_is_in_and_lets_nobody_else_in():
    async def scenario():
        admission = Admission(running=1, waiting=1)
        with admission.admit(1):
            draining = asyncio.create_task(admission.drain(60))
            await asyncio.sleep(0)
            assert refused(admission, 1).status == 503
            assert not draining.done()
        assert await draining == 0

    asyncio.run(scenario())


def test_draining_ends_with_its_timeout():
    async def scenario():
        admission = Admission(running=1, waiting=1)
        with admission.admit(2):
            return await admission.drain(0)

    assert asyncio.run(scenario()) == 2


def test_a_tenant_has_no_more_waiting_than_it_may_while_others_come_in():
    admission = Admission(running=2, waiting=100, tenants=TenantLimits(2, {"alice": 4}))

    def full(tenant, sequences=1):
        with pytest.raises(ApiError) as caught, admission.admit(sequences, tenant=tenant):
            pass
        return caught.value

    with contextlib.ExitStack() as held:
        places = [held.enter_context(admission.admit(1, tenant="bob")) for _ in range(4)]  # 2 find a place free
        assert admission.waiting("bob") == 2 and not admission.has_room(1, "bob")
        error = full("bob")
        assert (error.status, error.code) == (429, "tenant_queue_full")
        assert error.message == "the queue of tenant `bob` is full: 2 sequences wait, at most 2 may"
        assert error.retry_s is not None
        held.enter_context(admission.admit(4, tenant="alice"))
        assert "tenant `alice` is full: 4 sequences wait, at most 4 may" in full("alice").message
        assert "who names no `user`" in full("", 3).message
        for _ in range(2):  # a first token, however often it is told, ends the waiting of one sequence
            places[3].begin(0)
            places[0].begin(0)
        assert admission.waiting("bob") == 1
        with admission.admit(1, tenant="bob"):
            assert admission.waiting("bob") == 2
        assert (full("bob", 5).status, full("bob", 5).code) == (400, None)
    assert admission.open == 0 and admission.waiting("bob") == admission.waiting("alice") == 0
    with admission.admit(4, tenant="bob"):
        assert admission.waiting("bob") == 2


def test_without_a_limit_a_tenant_may_fill_the_queue():
    admission = Admission(running=1, waiting=9, tenants=TenantLimits(0, {"alice": 1}))
    with admission.admit(10, tenant="bob"):
        assert admission.waiting("bob") == 9
    assert admission.has_room(2, "alice") and not admission.has_room(3, "alice")
