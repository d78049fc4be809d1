"""Large pages: whatever weights lie on, they are the same bytes at the same place."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmctl.kernels.cpu import pages
from llmctl.kernels.cpu.pages import LARGE_PAGE, Pages, ask_for_large_pages, settle_on_large_pages
from llmctl.quant.formats.stored import map_file

needs_large_pages = pytest.mark.skipif(not pages.large_pages_allowed(), reason="the system gives no large pages")


@pytest.fixture
def content():
    return np.random.default_rng(0).integers(0, 256, 40 * LARGE_PAGE + 4321, dtype=np.uint8)


@pytest.fixture
def path(tmp_path, content):
    content.tofile(tmp_path / "weights.bin")
    return tmp_path / "weights.bin"


def anonymous_bytes(data):
    """What of the bytes of `data` is memory of this process alone."""
    start = data.ctypes.data
    found = 0
    for first, last, fields in pages._areas(pages._MAPS.read_text()):
        if first < start + data.nbytes and start < last:
            found += int(fields.split("Anonymous:")[1].split()[0]) << 10
    return found


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_settled_bytes_are_the_same_at_the_same_place_wherever_they_lie(path, content, in_one_piece):
    if not in_one_piece:
        with path.open("r+b", buffering=0) as file:
            for start in range(0, content.size, 4096):
                file.write(content[start : start + 4096])
    mapped = map_file(path)
    ask_for_large_pages(mapped)
    part, address = mapped[12345:54321], mapped.ctypes.data
    assert settle_on_large_pages(mapped) in Pages
    np.testing.assert_array_equal(mapped, content)
    np.testing.assert_array_equal(part, content[12345:54321])
    assert mapped.ctypes.data == address and not mapped.flags.writeable


@needs_large_pages
def test_a_copy_takes_the_place_of_a_mapping_on_small_pages(path, content, monkeypatch):
    monkeypatch.setattr(pages, "_share_on_large_pages", lambda mapped: 0.0)
    mapped = map_file(path)
    part, address = mapped[12345:54321], mapped.ctypes.data
    assert settle_on_large_pages(mapped) is Pages.COPIED
    path.write_bytes(b"")  # the file is not read any more
    assert mapped.ctypes.data == address and anonymous_bytes(mapped) >= content.size
    np.testing.assert_array_equal(mapped, content)
    np.testing.assert_array_equal(part, content[12345:54321])


@needs_large_pages
def test_what_was_copied_is_on_large_pages_and_is_not_copied_again(path, monkeypatch):
    mapped = map_file(path)
    monkeypatch.setattr(pages, "_ENOUGH", 2.0)
    assert settle_on_large_pages(mapped) is Pages.COPIED
    monkeypatch.undo()
    if pages._share_on_large_pages(mapped) < 0.8:
        pytest.skip("the system had no large pages left")
    assert settle_on_large_pages(mapped) is Pages.MAPPED


def test_where_the_system_gives_none_the_mapping_stays(path, monkeypatch):
    monkeypatch.setattr(pages, "STATE", path.with_name("missing"))
    mapped = map_file(path)
    assert settle_on_large_pages(mapped) is Pages.SMALL
    assert anonymous_bytes(mapped) == 0


def test_a_small_file_stays_mapped(tmp_path):
    (tmp_path / "small").write_bytes(b"x" * 5000)
    assert settle_on_large_pages(map_file(tmp_path / "small")) is Pages.SMALL


@needs_large_pages
def test_a_refusal_of_memory_leaves_the_mapping_as_it_was(path, content, monkeypatch):
    monkeypatch.setattr(pages, "_share_on_large_pages", lambda mapped: 0.0)
    mapped = map_file(path)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + content.size // 2, limit[1]))
    try:
        assert settle_on_large_pages(mapped) is Pages.SMALL
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    np.testing.assert_array_equal(mapped, content)
    assert anonymous_bytes(mapped) == 0


@needs_large_pages
def test_paths_of_other_mapped_files_may_be_any_bytes(path, tmp_path):
    strange = os.fsencode(tmp_path) + b"/y\xe9"
    shutil.copy(path, strange)
    script = f"""
import mmap, os
from pathlib import Path
from llmctl.kernels.cpu.pages import settle_on_large_pages
from llmctl.quant.formats.stored import map_file
other = mmap.mmap(os.open({strange!r}, os.O_RDONLY), 0, access=mmap.ACCESS_READ)
print(settle_on_large_pages(map_file(Path({str(path)!r}))).name)
"""
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=ascii_only)
    assert done.stdout.strip() in ("MAPPED", "COPIED")


@needs_large_pages
def test_a_process_that_may_not_have_large_pages_keeps_the_mapping(path):
    script = f"""
import ctypes
from pathlib import Path
PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
from llmctl.kernels.cpu.pages import settle_on_large_pages
from llmctl.quant.formats.stored import map_file
print(settle_on_large_pages(map_file(Path({str(path)!r}))).name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "SMALL"


@needs_large_pages
def test_ctrl_c_ends_a_copy_and_leaves_the_mapping_as_it_was(path, content):
    """The signal is there before the copy begins, but Python only looks for it when the copy asks."""
    script = f"""
import ctypes, signal, numpy as np
from llmctl.kernels import _cpu
from llmctl.quant.formats.stored import map_file
from pathlib import Path
mapped = map_file(Path({str(path)!r}))
address, size = mapped.ctypes.data, mapped.nbytes
trip = ctypes.pythonapi.PyErr_SetInterrupt
trip.restype = None
try:
    (trip(), _cpu.move_to_large_pages(address, size))
except KeyboardInterrupt:
    print("interrupted")
print(np.array_equal(mapped, np.fromfile({str(path)!r}, np.uint8)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["interrupted", "True"]


def test_a_mapping_that_is_none_is_told_by_its_errno():
    from llmctl.kernels import _cpu

    assert not _cpu.ask_for_large_pages(4096 + 1, LARGE_PAGE)
    assert _cpu.move_to_large_pages(0, 1 << 62) in (errno.ENOMEM, errno.ENOSYS)
