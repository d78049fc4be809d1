"""Kernels are compiled once and kept whole; without a compiler there is a sentence that says what to do."""

from pathlib import Path

import pytest

from llmctl.kernels.cuda import nvrtc
from llmctl.kernels.cuda.jit import FLAGS, Jit, Resources, architecture, compile_cubin, parse_resources
from llmctl.kernels.cuda.rows import COPY_TOKENS, MOVE_BLOCKS
from llmctl.kernels.cuda.source import Kernel, headers_of
from llmctl.kernels.errors import NoKernel, UsageError


def test_a_kernel_is_compiled_once_and_then_read(nvrtc_version: str, tmp_path: Path, monkeypatch) -> None:
    jit = Jit(tmp_path, "sm_90a")
    made = jit.get(COPY_TOKENS)
    monkeypatch.setattr(nvrtc, "compile", lambda *_: pytest.fail("compiled again"))
    found = Jit(tmp_path, "sm_90a").get(COPY_TOKENS)
    assert found.code == made.code and found.symbol == made.symbol and found.resources == made.resources
    assert made.code[:4] == b"\x7fELF" and "copy_tokens" in made.symbol and made.resources.registers > 0
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".cubin", ".json"]


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_a_torn_file_is_compiled_again(nvrtc_version: str, tmp_path: Path, suffix: str) -> None:
    jit = Jit(tmp_path, "sm_80")
    made = jit.get(MOVE_BLOCKS)
    (path,) = tmp_path.glob(f"*{suffix}")
    path.write_bytes(path.read_bytes()[:40])
    assert not jit.has(MOVE_BLOCKS)
    assert jit.get(MOVE_BLOCKS).code == made.code
    assert jit.has(MOVE_BLOCKS)


def test_without_jit_only_what_is_there_is_used(nvrtc_version: str, tmp_path: Path, monkeypatch) -> None:
    made = Jit(tmp_path, "sm_90a").get(COPY_TOKENS)
    monkeypatch.setattr(nvrtc, "version", lambda: pytest.fail("no compiler is needed"))
    closed = Jit(tmp_path, "sm_90a", compile=False)
    assert closed.get(COPY_TOKENS).code == made.code
    with pytest.raises(NoKernel, match="move_blocks is not compiled for sm_90a, and `--no-jit` forbids") as caught:
        closed.get(MOVE_BLOCKS)
    assert "llmctl kernels build --all --arch sm_90a" in caught.value.hint


def test_what_does_not_compile_says_so_with_the_compilers_words(nvrtc_version: str) -> None:
    with pytest.raises(nvrtc.CompileError, match='identifier "nothing" is undefined'):
        compile_cubin(Kernel("rows.cuh", "embed<nothing>"), "sm_90a")


def test_an_architecture_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="`sm_70`") as caught:
        compile_cubin(COPY_TOKENS, "sm_70")
    assert "sm_90a" in caught.value.hint


def test_a_gpu_gets_the_best_code_that_it_runs() -> None:
    assert architecture(9, 0) == "sm_90a"
    assert architecture(10, 0) == "sm_100a"
    assert architecture(8, 7) == "sm_86"  # an Orin runs what an A10 does
    assert architecture(12, 1) == "sm_120"
    assert architecture(7, 5) == "sm_75"
    with pytest.raises(NoKernel, match=r"7\.0"):
        architecture(7, 0)


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(monkeypatch) -> None:
    monkeypatch.setattr(nvrtc, "_packaged", list)
    monkeypatch.setattr(nvrtc, "_NAMES", ("libnvrtc-that-is-not-there.so",))
    nvrtc._library.cache_clear()
    try:
        with pytest.raises(UsageError, match="not found") as caught:
            nvrtc._library()
    finally:
        nvrtc._library.cache_clear()
    assert "pip install 'llmctl-toolchain[cuda]'" in caught.value.hint


def test_the_assemblers_words_become_figures() -> None:
    log = (
        "ptxas info    : Compiling entry function '_Z1k' for 'sm_90a'\nptxas info    : Function properties for _Z1k\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 56 registers, used 1 barriers, 16 bytes cumulative stack size, 2048 bytes smem\n"
    )
    assert parse_resources(log) == Resources(56, 8, 12, 16, 2048)


def test_the_key_covers_every_header_that_is_included() -> None:
    assert {path.name for path in headers_of("attend.cuh")} == {"attend.cuh", "fragments.cuh", "prims.cuh"}
    assert {path.name for path in headers_of("sample.cuh")} == {"sample.cuh", "noise.cuh", "prims.cuh"}
    assert "--fmad=false" in FLAGS  # two specializations would else round differently
