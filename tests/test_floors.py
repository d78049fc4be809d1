"""The floors of the house: kernels < quant < engine < cli, imports point downward, and no circle between files."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("kernels", "quant", "engine", "", "cli", "__main__")  # "" is the package's own `__init__`


def sources(root):
    """{dotted module name inside the package: path} of every source file; a package goes by its folder's name."""
    files = [root / "__init__.py", root / "__main__.py"]
    for floor in ("kernels", "quant", "engine", "cli"):
        files += sorted((root / floor).rglob("*.py"))
    found = {}
    for path in files:
        if path.exists():
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name, path, modules):
    """(line, target, absolute) of every import of our own in a file, wherever in the file it stands."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [(alias.name, True) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = from_names(node, package, modules)
        elif called_name(node) == "import_module" and node.args and isinstance(node.args[0], ast.Constant):
            written = node.args[0].value
            level = len(written) - len(written.lstrip("."))
            if level:
                rest = [part for part in written.lstrip(".").split(".") if part]
                names = [(".".join([*package[: len(package) - level + 1], *rest]), False)]
            else:
                names = [(written, True)]
        else:
            continue
        for target, absolute in names:
            if absolute:
                first, _, rest = target.partition(".")
                if first == "llmctl" or target in modules or first in FLOORS[:3] + FLOORS[4:5]:
                    yield node.lineno, rest if first == "llmctl" else target, True
            else:
                yield node.lineno, target, False


def from_names(node, package, modules):
    if node.level == 0:
        return [(node.module, True)]
    base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
    base = ".".join(part for part in base if part)
    names = []
    for alias in node.names:
        inner = f"{base}.{alias.name}" if base else alias.name
        names.append((inner if inner in modules else base, False))
    return names


def called_name(node):
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def problems(root):
    """Everything in the tree that breaks the house rules, as `file:line: what`."""
    modules = sources(root)
    found, edges = [], {}
    for name, path in modules.items():
        where = path.relative_to(root)
        for line, target, absolute in imports(name, path, modules):
            if absolute:
                found.append(f"{where}:{line}: absolute import of {target or 'llmctl'}")
            if FLOORS.index(target.split(".")[0]) > FLOORS.index(name.split(".")[0]):
                found.append(f"{where}:{line}: upward import of {target}")
            edges.setdefault(name, set()).add(target)
    found += [f"circle: {' > '.join(circle)}" for circle in circles(edges)]
    if (root / "kernels" / "__init__.py").exists():
        found.append("kernels/__init__.py exists: transformers would take our folder for PyPI's `kernels`")
    return found


def circles(edges):
    """One path around each circle that a depth-first walk meets."""
    done, found = set(), []

    def walk(name, trail):
        if name in trail:
            found.append([*trail[trail.index(name) :], name])
            return
        if name in done:
            return
        for target in sorted(edges.get(name, ())):
            walk(target, [*trail, name])
        done.add(name)

    for name in sorted(edges):
        walk(name, [])
    return found


def test_imports_point_downward_and_no_circle_exists():
    assert problems(ROOT) == []


def tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"kernels/a.py": "from ..engine import b", "engine/b.py": ""}, "kernels/a.py:1: upward import of engine.b"),
        ({"kernels/a.py": "from ..engine.b import c", "engine/b.py": ""}, "kernels/a.py:1: upward import of engine.b"),
        (
            {"engine/a.py": "def f():\n    from ..cli.b import c", "cli/b.py": ""},
            "engine/a.py:2: upward import of cli.b",
        ),
        (
            {"quant/a.py": "import importlib\nimportlib.import_module('..engine.b', __package__)", "engine/b.py": ""},
            "quant/a.py:2: upward import of engine.b",
        ),
        ({"engine/a.py": "import llmctl.engine.b", "engine/b.py": ""}, "engine/a.py:1: absolute import of engine.b"),
        ({"engine/a.py": "from kernels import b", "kernels/b.py": ""}, "engine/a.py:1: absolute import of kernels"),
        (
            {"engine/a.py": "from .b import c", "engine/b.py": "from . import a"},
            "circle: engine.a > engine.b > engine.a",
        ),
        ({"kernels/__init__.py": ""}, "kernels/__init__.py exists"),
    ],
)
def test_a_broken_rule_is_found(tmp_path, files, problem):
    assert [text for text in problems(tree(tmp_path, files)) if text.startswith(problem)]


def test_downward_imports_and_packages_pass(tmp_path):
    files = {
        "kernels/a.py": "import numpy\nfrom os import path",
        "kernels/ref/__init__.py": "from . import b",
        "kernels/ref/b.py": "from ..a import path",
        "engine/c.py": "from ..kernels import a\nfrom ..kernels.ref.b import path",
        "__init__.py": "def f():\n    from .engine.c import path",
        "cli/d.py": "from .. import f\nfrom ..engine import c",
        "__main__.py": "from .cli.d import f",
    }
    assert problems(tree(tmp_path, files)) == []
