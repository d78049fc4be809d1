"""The package as a whole: what it promises before anything is loaded, and what its files must not say."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import llmctl

ROOT = Path(__file__).resolve().parents[1]
HEAVY = (
    *("torch", "transformers", "tokenizers", "huggingface_hub", "prompt_toolkit"),
    *("starlette", "uvicorn", "uvloop", "prometheus_client", "yaml"),
)
SUFFIXES = {".py", ".sh", ".md", ".toml", ".txt", ".yaml", ".yml", ".hpp", ".cpp", ".cuh"}


def loaded_by(code):
    """Which heavy packages a fresh interpreter has loaded after `code`."""
    report = f"import sys\n{code}\nprint([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.strip().splitlines()[-1]


def test_import_loads_nothing_heavy():
    assert loaded_by("import llmctl")[1] == "[]"


def test_help_of_every_command_loads_nothing_heavy():
    lines = [["--help"], *([name, "--help"] for name in ("chat", "serve", "plan", "doctor", "models"))]
    code = (
        "from llmctl.cli.app import run\nfrom llmctl.cli.console import terminal\n"
        f"for line in {lines!r}:\n    assert run(line, terminal()) == 0, line"
    )
    stdout, heavy = loaded_by(code)
    assert heavy == "[]"
    assert "--max-num-batched-tokens" in stdout


def test_version_is_one_number_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == llmctl.__version__
    done = subprocess.run([sys.executable, "-m", "llmctl", "--version"], capture_output=True, text=True, cwd="/")
    assert done.stdout == f"llmctl {llmctl.__version__}\n"


def test_files_name_no_absolute_path_of_a_machine():
    found = []
    for path in tracked_files():
        if path.suffix in SUFFIXES or path.name in ("Makefile", "run", "CMakeLists.txt"):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if re.search(r"(?<![\w.])/(?:home|work|root|Users|workspace)/", line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    this = f"{Path(__file__).relative_to(ROOT)}:"
    assert [text for text in found if not text.startswith(this)] == []


def test_every_package_folder_reaches_the_wheel():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]
    for target, source in build["packages"].items():
        assert (ROOT / source).is_dir(), source
        assert target == f"llmctl/{source}"
    for source in build["force-include"]:
        assert (ROOT / source).is_file(), source


def tracked_files():
    """Source files, without what builds and environments leave beside them."""
    skipped = {".git", ".venv", "build", "dist", "__pycache__", ".mypy_cache", ".ruff_cache", ".hypothesis"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not skipped & set(path.relative_to(ROOT).parts)]
