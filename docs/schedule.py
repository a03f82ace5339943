"""Write docs/schedule.md from the declarations: `python docs/schedule.py`."""

from __future__ import annotations

from pathlib import Path

from uniep.dimension import Dimension
from uniep.schedule import DEFAULT_SCHEDULES, DIMENSIONS, TILES, known_fields

PAGE = Path(__file__).with_name("schedule.md")
HEAD = """# Schedule

Every dimension of a `Schedule`, as it is declared in `uniep/schedule.py`; `python docs/schedule.py` makes this page.
None of them changes a bit of any result. As text, for `uniep trace --schedule` and the benchmarks:
`overlap=serial,gate_up.columns=128` (or with `+`).

Scope: *local* dimensions may depend on a rank's number of tokens, which its peers do not know, so two ranks may run
differently in one call. *Wire* dimensions say how ranks communicate and are equal on all ranks. (On the CPU each rank
plans the queues of all ranks, so all dimensions are equal.) `uniep.way.resolve(cfg, ep_size, num_tokens, schedule)`
makes the choices for one call; the printed result says which rule chose what, and why.

*Source*: UniEP (arXiv 2604.19241), HyperParallel-MoE (arXiv 2605.23764), COMET, DeepEP, or own. Defaults in parentheses
are those of a backend; *by shape*: `default_schedule` chooses by layer, number of ranks and `max_tokens_per_rank`.
"""
TAIL = """
## Which can be combined

`is_valid(schedule, cfg, ep_size, backend)` lists everything that cannot run, with the remedy. A value that has no
meaning on a backend is refused by name. `neighbours(schedule, setting)` gives the valid schedules one step away.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _domain(d: Dimension) -> str:
    if isinstance(d.default, str):
        return ", ".join(f"`{v}`" + (f" ({'; '.join(d.only[v])})" if v in d.only else "") for v in d.domain)
    return ", ".join(map(str, d.domain))


def _default(d: Dimension) -> str:
    usual = (f"{backend}: {'by shape' if callable(value) else value}" for backend, value in d.usual.items())
    others = ", ".join(usual)
    return f"`{d.default}`" + (f" ({others})" if others else "")


def _line(d: Dimension, name: str) -> str:
    cells = (
        f"`{name}`", _domain(d), _default(d), d.scope, "; ".join(d.backends), f"{d.doc} *When*: {d.helps}", d.source,
    )  # fmt: skip
    return f"| {' | '.join(map(_cell, cells))} |"


def page() -> str:
    """The text of docs/schedule.md."""
    columns = ("dimension", "values (numbers: worth a try)", "default", "scope", "backends", "what it does", "source")
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    own = [_line(d, d.name) for d in DIMENSIONS if "." not in d.name]
    first, *_ = TILES
    parts = [_line(d, d.name.partition(".")[2]) for d in DIMENSIONS if d.name.startswith(f"{first}.")]
    tiles = [f"- `{name}`: tiles of {of}." for name, of in TILES.items()]
    fields = [f"- `{backend}`: {', '.join(f'`{f}`' for f in known_fields(backend))}" for backend in DEFAULT_SCHEDULES]
    return "\n".join(
        [
            HEAD,
            head,
            *own,
            "\n## Tiles\n",
            *tiles,
            "",
            head,
            *parts,
            "\n## Fields that a backend knows\n",
            *fields,
            TAIL,
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
