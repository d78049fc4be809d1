"""Ctrl-C before a server has begun to run."""

import asyncio
import gc
import warnings

import pytest

from llmctl.cli.api import server


def test_ctrl_c_before_the_event_loop_runs_leaves_nothing_to_complain_of(monkeypatch):
    class Server:
        def __init__(self, *given):
            pass

        async def run(self):
            raise AssertionError("it was interrupted before")

    def interrupted(runner):
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "Server", Server)
    monkeypatch.setattr(asyncio.Runner, "__enter__", interrupted)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            server.serve(None, None, None, None, None)
        gc.collect()
    # What other tests left behind is collected here too.
    assert [str(each.message) for each in warned if "never awaited" in str(each.message)] == []
