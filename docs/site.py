"""mkdocs' hooks: pages that lie outside of docs/, and links to files that the site does not have.

README.md is the site's first page; CONTRIBUTING.md, CHANGELOG.md and benchmarks/README.md are pages, too.  A link to a
source file becomes its name: the site has no copy of the sources.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""File of the repository -> page."""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    sources = {of: source for source, of in OUTSIDE.items()}
    here = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewrite(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        name, _, anchor = target.partition("#")
        if not name or ":" in name:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), name))
        found = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if found is None or (ROOT / path).is_dir():
            if not (ROOT / path).exists():
                return link[0]  # mkdocs complains
            return f"`{path}`" if text.strip("`") in (path, posixpath.basename(path)) else f"{text} (`{path}`)"
        relative = posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or ".")
        return f"{picture}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(rewrite, markdown)
