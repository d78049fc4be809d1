"""`llmctl kernels build`: what is there is kept, what fails is told, and processes share the work."""

import json

import pytest

from llmctl.cli import app
from llmctl.cli.exits import ExitCode
from llmctl.kernels.cuda import nvrtc, table
from llmctl.kernels.cuda.jit import ARCHITECTURES, Jit
from llmctl.kernels.cuda.listed import Listed
from llmctl.kernels.cuda.source import Kernel
from llmctl.kernels.errors import UsageError
from tests.engine.tiny import write_checkpoint

GOOD = [Kernel("kv_blocks.cuh", name) for name in ("copy_tokens", "move_blocks")]
BAD = Kernel("kv_blocks.cuh", "no_such_kernel")


@pytest.fixture(autouse=True)
def registered(tmp_path, monkeypatch):
    """Two kernels are all that are registered, and the cache is empty."""
    try:
        nvrtc.version()
    except UsageError as error:
        pytest.skip(error.message)
    monkeypatch.setenv("LLMCTL_CACHE", str(tmp_path))
    kernels = list(GOOD)
    monkeypatch.setattr(table, "all_kernels", lambda arch: [Listed(kernel, 128) for kernel in kernels])
    return kernels


def build(console, *words):
    code = app.run(["kernels", "build", "--all", "--json", *words], console)
    return code, json.loads(console.stdout.getvalue() or "{}")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_what_is_compiled_is_not_compiled_again(make_console, tmp_path, jobs):
    for expected in (4, 0):
        code, figures = build(make_console(), "--arch", "sm_80,sm_90a", "-j", jobs)
        assert code == ExitCode.OK
        assert (figures["kernels"], figures["compiled"], figures["failed"]) == (4, expected, {})
    assert all(Jit(tmp_path / "cubins", "sm_90a").has(kernel) for kernel in GOOD)


def test_each_templates_kernels_are_counted_with_the_most_that_one_takes(make_console):
    console = make_console()
    _, figures = build(console, "--arch", "sm_80,sm_90a", "-j", "1")
    rows = {(row["template"], row["arch"]): row for row in figures["families"]}
    assert set(rows) == {(kernel.expression, arch) for kernel in GOOD for arch in ("sm_80", "sm_90a")}
    assert all(row["kernels"] == 1 and row["registers"] > 0 and row["spills"] == 0 for row in rows.values())
    console = make_console()
    app.run(["kernels", "build", "--all", "--arch", "sm_80", "-j", "1"], console)
    (line,) = (line.split() for line in console.stdout.getvalue().splitlines() if line.split()[:1] == ["copy_tokens"])
    assert line[1:3] == ["sm_80", "1"] and line[4:] == ["0", "0"]


def test_what_does_not_compile_is_told_and_the_rest_compiled(make_console, registered, tmp_path):
    registered.insert(0, BAD)
    console = make_console()
    code, figures = build(console, "--arch", "sm_80", "-j", "2")
    assert code != ExitCode.OK and figures["compiled"] == 2
    assert "no_such_kernel" in figures["failed"]["no_such_kernel for sm_80"]
    assert "1 of 3 kernels do not compile, the first is no_such_kernel for sm_80" in console.stderr.getvalue()


def test_an_unknown_architecture_is_refused_and_all_are_all(make_console, registered):
    console = make_console()
    assert build(console, "--arch", "sm_80,sm_70")[0] == ExitCode.USAGE
    assert "--arch is `sm_70`" in console.stderr.getvalue()
    registered.clear()
    assert build(make_console(), "--arch", "all")[1]["archs"] == list(ARCHITECTURES)


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_a_model_that_no_gpu_would_run_is_refused_before_anything_is_compiled(make_console, tmp_path, family):
    folder = write_checkpoint(tmp_path / "model", family)
    console = make_console()
    assert app.run(["kernels", "build", str(folder)], console) == ExitCode.UNSUPPORTED
    assert "known are 32, 64" in console.stderr.getvalue() and not (tmp_path / "cubins").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["model", "--all"], "--all and the model `model` are both given"),
        (["--all", "-j", "1025"], "--jobs is 1025"),
        (["--all", "--dtype", "float16"], "--all and --dtype `float16` are both given"),
        (["--all", "--kv-cache-dtype", "fp8"], "--all and --kv-cache-dtype `fp8` are both given"),
        (["model", "--dtype", "int4"], "--dtype is `int4`"),
        (["model", "--kv-cache-dtype", "fp4"], "--kv-cache-dtype is `fp4`"),
    ],
)
def test_words_that_cannot_work_are_refused(make_console, words, error):
    console = make_console()
    assert app.run(["kernels", "build", *words], console) == ExitCode.USAGE
    assert error in console.stderr.getvalue()


def test_a_models_kernels_are_those_that_its_headers_ask_for(make_console, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        table, "model_kernels", lambda arch, needs: asked.append((arch, needs)) or [Listed(GOOD[0], 128)]
    )
    folder = write_checkpoint(tmp_path / "model", "qwen3")
    code = app.run(["kernels", "build", str(folder), "--dtype", "float16", "--kv-cache-dtype", "fp8"], make_console())
    ((arch, needs),) = asked
    assert (code, arch) == (ExitCode.OK, "sm_90a")
    assert (needs.act, needs.kv, needs.head_dim, needs.hidden_size) == ("f16", "fp8_e4m3", 32, 64)
    assert Jit(tmp_path / "cubins", "sm_90a").has(GOOD[0])
