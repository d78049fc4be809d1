"""What `doctor` finds, shows and calls a problem."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from llmctl.cli import app, diagnosis
from llmctl.cli.commands.doctor import as_json, kernel_rows, show
from llmctl.cli.exits import ExitCode
from llmctl.cli.kernel_choice import Choice, choices
from llmctl.engine.config import Environment
from llmctl.kernels import registry
from llmctl.kernels.entry import OPS, Entry


def entry(op, isa, priority, reason=None):
    return Entry(op, "cpu", isa, isa, priority, lambda args: reason, lambda args: (), f"{op}.hpp")


@pytest.fixture
def kernels(monkeypatch):
    """A registry in which AVX2 refuses everywhere and generic code takes all ops but sampling."""
    found = [entry(op, "avx2", 20, "no avx2 here") for op in OPS]
    found += [entry(op, "generic", 10, "no sampler" if op == "sample" else None) for op in OPS]
    monkeypatch.setattr(registry, "entries", lambda: tuple(sorted(found, key=lambda e: -e.priority)))


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "_hub_cache", lambda: tmp_path / "hub")
    return Environment("", tmp_path / "cache", False)


def test_every_op_is_asked_with_arguments_of_its_own(kernels):
    assert {choice.op for choice in choices()} == set(OPS)


def test_best_kernel_that_accepts_is_named_with_the_refusals_before_it(kernels):
    found = {(choice.op, choice.case): choice for choice in choices()}
    assert found["linear", "int4g32"] == Choice("linear", "int4g32", "generic", "linear.hpp", ("avx2: no avx2 here",))
    assert found["sample", ""].isa == "reference"
    assert found["sample", ""].refused == ("avx2: no avx2 here", "generic: no sampler")


def test_real_registry_answers_without_torch():
    import subprocess
    import sys

    code = (
        "import sys\nfrom llmctl.cli.kernel_choice import choices\nassert choices()\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/", timeout=60)


def test_every_package_that_is_depended_on_is_looked_for():
    project = tomllib.loads((Path(diagnosis.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    assert {*diagnosis.NEEDED, *diagnosis.OPTIONAL} == names


def test_formats_with_one_outcome_share_a_row():
    rows = kernel_rows(
        (
            Choice("linear", "f32", "avx2", "linear.hpp", ()),
            Choice("linear", "f16", "avx2", "linear.hpp", ()),
            Choice("linear", "bf16", "generic", "linear.hpp", ("avx2: no bf16",)),
        )
    )
    assert rows == [
        ["linear", "f32, f16", "avx2", "-"],
        ["linear", "bf16", "generic", "avx2: no bf16"],
    ]


def test_op_that_would_run_on_the_reference_is_a_problem(kernels, environment):
    found = diagnosis.diagnose(environment)
    assert [text for text in found.problems if text.startswith("sample would run on the slow reference")]


def test_missing_package_is_a_problem_but_torch_is_not(kernels, environment, monkeypatch):
    monkeypatch.setattr(diagnosis, "_version", lambda name: "" if name in ("numpy", "torch") else "1.0")
    problems = diagnosis.diagnose(environment).problems
    assert "package `numpy` is not installed" in problems
    assert not [text for text in problems if "torch" in text]


def test_cache_that_cannot_be_written_is_a_problem(kernels, tmp_path):
    (tmp_path / "file").write_text("")
    found = diagnosis.diagnose(Environment("", tmp_path / "file" / "cache", False))
    assert [text for text in found.problems if "cannot be written to" in text]


def test_default_model_is_looked_for_and_not_fetched(kernels, environment):
    assert diagnosis.diagnose(environment).default_model == ""
    assert not environment.cache.exists()


def test_folder_size_counts_files_below(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"12345")
    (tmp_path / "y").write_bytes(b"123")
    assert diagnosis.folder_bytes(tmp_path) == 8
    assert diagnosis.folder_bytes(tmp_path / "none") == 0


def test_json_and_table_tell_the_same(kernels, environment, console):
    found = diagnosis.diagnose(environment)
    report = json.loads(json.dumps(as_json(found)))
    assert report["machine"]["cores"] == found.machine.cores
    show(console, found)
    assert found.machine.model in console.stdout.getvalue()
    assert "gemma3_text" in report["families"] and "gemma3_text" in console.stdout.getvalue()
    assert f"transformers {found.packages['transformers']}" in " ".join(console.stdout.getvalue().split())
    assert "slow reference" in console.stderr.getvalue()


@pytest.mark.parametrize(("problems", "code"), [((), ExitCode.OK), (("it is broken",), ExitCode.FAILURE)])
def test_exit_code_says_whether_something_is_wrong(kernels, environment, console, monkeypatch, problems, code):
    monkeypatch.setenv("LLMCTL_CACHE", str(environment.cache))
    monkeypatch.setattr(diagnosis, "_problems", lambda *args: problems)
    assert app.run(["doctor", "--json"], console) == code
    assert json.loads(console.stdout.getvalue())["problems"] == list(problems)


def test_doctor_says_which_gguf_types_are_kept_and_what_happens_to_the_others(environment):
    found = diagnosis.diagnose(environment)
    assert {"Q4_0", "Q5_0", "Q8_0", "Q3_K", "F32"} <= set(found.gguf_types) and "Q4_K" not in found.gguf_types
    assert "F16 stored as int16g32: values rounded to 14 bits of the largest of 32" in found.gguf_roundings
    assert "Q4_K stored as int4g32min: scales rounded to float16" in found.gguf_roundings
    assert "Q6_K stored as int8g32: values rounded to 8 bits" in found.gguf_roundings
