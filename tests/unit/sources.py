"""Which files of the package a module imports."""

import ast
from pathlib import Path

import uniep

PACKAGE = Path(uniep.__file__).parent


def imported(module, seen=None):
    """The module's file and those that it imports, also inside functions, but not for types alone: paths in the
    package."""
    seen = set() if seen is None else seen
    path = PACKAGE.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    name = path.relative_to(PACKAGE).as_posix()
    if module == "uniep" or name in seen or not path.is_file():
        return seen
    seen.add(name)
    nodes = [ast.parse(path.read_text())]
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        nodes += ast.iter_child_nodes(node)
        found = [node.module] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found += [".".join([*found[:1], of.name]) for of in node.names]
        for other in found:
            if other.partition(".")[0] == "uniep":
                imported(other, seen)
    return seen
