"""Garbage collection is off while imports run, and afterwards as it was."""

import gc

import pytest

from llmctl.cli.uncollected import uncollected


@pytest.mark.parametrize("before", [True, False])
def test_collection_is_off_meanwhile_and_then_as_before_also_after_an_error(before):
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(ImportError), uncollected():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is before
    finally:
        (gc.enable if was else gc.disable)()
