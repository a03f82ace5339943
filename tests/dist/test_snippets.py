"""Python in README.md and the pages: every block is run on four ranks, or says why not.

A block runs in the namespace of the blocks before it on its page.  What it needs beside them stands in front of it in a
comment, `<!-- setup ... -->`.  `<!-- not run: reason -->` in front of a block leaves it out; then it must compile, and
what it imports from uniep must exist.
"""

import ast
import importlib
import linecache
import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"<!-- setup\n(?P<setup>.*?)-->|(?P<skip><!-- not run: [^>]+-->)|^```python\n(?P<code>.*?)^```", re.S | re.M
)


def parts(page):
    """(line, code, whether it is run) of a page's blocks and setups, in order."""
    text, skip = page.read_text(), False
    for match in BLOCK.finditer(text):
        if match["skip"]:
            skip = True
            continue
        code = match["setup"] or match["code"]
        line = text[: match.start()].count("\n") + 1
        yield line, "\n" * line + code, not (skip and match["code"])
        skip = skip and bool(match["setup"])


def run_page(world, name, blocks, folder):
    """The blocks, one behind the other; the process group is there already and stays."""
    os.chdir(folder)
    kept = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None
    try:
        space = {"__name__": "__main__"}
        for code in blocks:
            linecache.cache[name] = len(code), None, code.splitlines(True), name  # Triton reads the source of functions
            try:
                exec(compile(code, name, "exec"), space)
            except pytest.skip.Exception as missing:
                return str(missing)
    finally:
        dist.init_process_group, dist.destroy_process_group = kept
    return ""


RUN = [page for page in PAGES if any(runs for _, _, runs in parts(page))]


@pytest.mark.parametrize(
    "page",
    [page if page.name == "README.md" else pytest.param(page, marks=pytest.mark.slow) for page in RUN],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_blocks_run(pool, page, tmp_path):
    blocks = [code for _, code, runs in parts(page) if runs]
    skipped = pool.run(run_page, page.name, blocks, tmp_path, ranks=4)
    if any(skipped):
        pytest.skip(skipped[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_compile_and_import_what_exists(page):
    for line, code, _ in parts(page):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "uniep":
                try:
                    module = importlib.import_module(node.module)
                except Exception as error:
                    if "cannot be imported" in str(error):  # the framework is not here
                        continue
                    raise
                missing = [a.name for a in node.names if not hasattr(module, a.name)]
                for name in missing[:]:
                    if importlib.util.find_spec(f"{node.module}.{name}"):
                        missing.remove(name)
                assert not missing, f"line {line}: {node.module} has no {missing}"
