"""Pages: links and anchors lead somewhere, quoted messages exist, the site has every page."""

import ast
import functools
import itertools
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """Without code, in which brackets are no links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))


@functools.cache
def anchors(page: Path) -> set[str]:
    """As the site and code hosts make them of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    wrong = []
    for match in LINK.finditer(prose(page)):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            wrong.append(target)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_headings_stand_alone(page):
    """Without a blank line before it, a heading is a row of the table above."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE).splitlines()
    wrong = [line for above, line in itertools.pairwise(lines) if re.match("#+ ", line) and above.strip()]
    assert wrong == []


@functools.cache
def messages() -> list[str]:
    """All texts of src, f-strings with their values left out as one blank each."""
    found = []
    for path in (ROOT / "src" / "uniep").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_quoted_messages_exist():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    heads = re.findall(r"^\*\*(.*?)\*\*", page, re.MULTILINE | re.DOTALL)
    quoted = [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", " ".join(heads))]
    quoted += [" ".join(text.split()) for text in re.findall(r"\*\*, \*\*`([^`]+)`", page)]
    assert len(quoted) > 40
    assert [text for text in quoted if not any(text in message for message in messages())] == []


def test_the_site_has_every_page():
    listed = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted({*pages, "index.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks.md"})


def test_the_scale_page_has_the_simulated_times():
    page, names = (
        (ROOT / "docs" / "scale.md").read_text(),
        ("serialized", "deepep", "hierarchical", "taskflow", "uniep"),
    )
    rows = json.loads((ROOT / "benchmarks" / "results" / "scale.json").read_text())["rows"]
    plain = [row for row in rows if row["routing"] == "balanced" and "combine_groups" not in row]
    ms = {(row["ep"], row["schedule"], row["direction"]): row["makespan_us"] / 1e3 for row in plain}
    for ep in sorted({ep for ep, _, _ in ms}):
        cells = (", ".join(f"{ms[ep, name, direction]:.1f}" for direction in ("fwd", "bwd")) for name in names)
        assert f"| {ep} | {' | '.join(cells)} |" in page
