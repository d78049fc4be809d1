"""Where a swap space cannot be, which is told before a model is built."""

from pathlib import Path

import pytest

from llmctl.engine.load.disk import check_swap_room
from llmctl.kernels.errors import CapacityError


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_that_will_hold_it(tmp_path):
    check_swap_room(tmp_path / "some" / "swap", 1 << 20)
    assert not (tmp_path / "some").exists()
    with pytest.raises(CapacityError, match=r"it needs 1024 TiB \(1125899906842624 bytes\)"):
        check_swap_room(tmp_path / "some" / "swap", 1 << 50)


def test_a_file_in_its_place_and_a_folder_that_may_not_be_written_to_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CapacityError, match="`.*/file` is no folder") as caught:
        check_swap_room(tmp_path / "file" / "swap", 1)
    assert "--swap-space 0" in caught.value.hint
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # a superuser may write anywhere
    with pytest.raises(CapacityError, match="may not be written to"):
        check_swap_room(tmp_path / "swap", 1)
