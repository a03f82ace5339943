"""Imports run one way: in the order of the table in docs/architecture.md, and without circles between modules.

All imports count: those inside functions and those for types, too.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "uniep"


def modules(source: Path) -> dict[str, Path]:
    """Name -> file of every module under `source`, which is a package."""
    parts = {path: (source.name, *path.relative_to(source).with_suffix("").parts) for path in source.rglob("*.py")}
    return {".".join(name).removesuffix(".__init__"): path for path, name in parts.items()}


def imports(source: Path) -> dict[str, set[str]]:
    """Module -> the modules of the same package that it imports anywhere."""
    known = modules(source)
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == source.name:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found[name].add(inner if inner in known else node.module)
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names if alias.name in known}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in turn; [] if there are none."""
    left = {name: set(targets) & graph.keys() for name, targets in graph.items()}
    while free := [name for name, targets in left.items() if not targets]:
        left = {name: targets - set(free) for name, targets in left.items() if name not in free}
    return sorted(left)


def rooms() -> dict[str, int]:
    """Room -> its row in the table of docs/architecture.md."""
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    names = [re.findall(r"`(\w+)(?:\.py|/)`", row) for row in rows]
    return {name: row for row, listed in enumerate(names) for name in listed}


def room(module: str) -> str:
    return (module.split(".")[1:] or ["__init__"])[0]


def test_no_circles():
    assert circle(imports(SOURCE)) == []


def test_imports_follow_the_table():
    row = rooms()
    wrong = [
        f"{name} imports {target}"
        for name, targets in imports(SOURCE).items()
        for target in targets
        if row[room(target)] > row[room(name)]
    ]
    assert wrong == []


@pytest.mark.parametrize("where", ["{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_a_circle_is_found_wherever_it_is_imported(tmp_path, where):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from package import b")
    (package / "b.py").write_text(where.format("from package.a import name"))
    (package / "c.py").write_text("import package.a")
    assert circle(imports(package)) == ["package.a", "package.b", "package.c"]  # c hangs on the circle
