"""Markdown tables from result files, printed, or written between two marks of a page.

python benchmarks/table.py --pages                              README.md and docs/performance.md, from their files
python benchmarks/table.py benchmarks/results/h200x2_zipf.json
python benchmarks/table.py benchmarks/results/h200x2_groups.json --impl uniep,uniep-groups,deepep-nowait
python benchmarks/table.py --products benchmarks/results/h200_products.json
python benchmarks/table.py --worth benchmarks/results/h200x2_worth.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from results import DIRECTIONS, NAMES, PEERS, RESULTS, Timing, best_peer, load, machine_of, of_worth

LOADS = ("window", "sustained")
ROOT = RESULTS.parents[1]
BEGIN, END = "<!-- benchmarks: begin (benchmarks/table.py writes this part) -->", "<!-- benchmarks: end -->"


def tables(timings: list[Timing]) -> str:
    """One table per machine, load and direction; the best peer's time is in italics.  What was measured again, with all
    of its columns, is left out."""
    groups: dict[tuple[str, str, str], list[Timing]] = {}
    for timing in timings:
        if not any(_repeats(later, timing) for later in timings):
            groups.setdefault((timing.machine, timing.load, timing.direction), []).append(timing)
    return "\n".join(_table(*key, group) for key, group in groups.items())


def _repeats(later: Timing, timing: Timing) -> bool:
    """Whether `later` is the same case, measured after `timing`, with all of its columns."""
    cases = {(t.machine, t.load, t.direction, t.shape, t.tokens, t.routing) for t in (later, timing)}
    columns = timing.ms.keys() & {*PEERS, "uniep", "uniep-compute"}
    return len(cases) == 1 and later.meta["date"] > timing.meta["date"] and columns <= later.ms.keys()


def _table(machine: str, load_name: str, direction: str, timings: list[Timing]) -> str:
    peers = [impl for impl in PEERS if any(impl in timing.ms for timing in timings)]
    compute = any("uniep-compute" in timing.ms for timing in timings)
    head = ["shape", "tokens per GPU", "routing", *(f"{NAMES.get(impl, impl)} ms" for impl in peers)]
    head += ["uniep ms", "speedup", *(["to own compute"] if compute else []), "commit"]
    lines = [f"**{DIRECTIONS[direction].capitalize()}, {machine}, {load_name}**", ""]
    lines += ["| " + " | ".join(head) + " |", "|---|---:|---|" + "---:|" * (len(head) - 4) + "---|"]
    for timing in timings:
        ms, best = timing.ms, best_peer(timing.ms)
        cells = [timing.shape, str(timing.tokens), timing.routing]
        cells += [_number(ms.get(impl), mark=impl == best) for impl in peers]
        cells += [_number(ms.get("uniep")), f"**{timing.speedup:.2f}x**" if timing.speedup else ""]
        if compute:
            both = "uniep" in ms and "uniep-compute" in ms
            cells.append(f"{ms['uniep'] / ms['uniep-compute']:.2f}" if both else "")
        lines.append("| " + " | ".join([*cells, timing.meta["commit"]]) + " |")
    versions: dict[tuple[str, str], set[str]] = {}
    for t in timings:
        versions.setdefault((t.meta["torch"], t.meta["triton"]), set()).add(t.meta["date"][:10])
    for (torch_version, triton_version), days in versions.items():
        lines += ["", f"{', '.join(sorted(days))}, PyTorch {torch_version}, Triton {triton_version}."]
    return "\n".join(lines) + "\n"


def short(timings: list[Timing]) -> str:
    """One table per machine, a row per shape, a column per direction and load: best peer -> uniep, ms, and speedup."""
    columns = [(direction, load_name) for direction in DIRECTIONS for load_name in LOADS]
    lines: list[str] = []
    for machine in dict.fromkeys(t.machine for t in timings):
        of_machine = [t for t in timings if t.machine == machine]
        metas = {(t.meta["commit"], t.meta["date"][:10], t.meta["torch"], t.meta["triton"]): None for t in of_machine}
        about = "; ".join(f"commit {c}, {day}, PyTorch {torch}, Triton {triton}" for c, day, torch, triton in metas)
        peers = ", ".join(dict.fromkeys(NAMES.get(b, b) for t in of_machine if (b := best_peer(t.ms))))
        lines += [f"**{machine}, {of_machine[0].tokens} tokens per GPU, ms: {peers} → uniep** ({about})", ""]
        heads = [f"{DIRECTIONS[direction]}, {load_name}" for direction, load_name in columns]
        lines += [f"| shape | {' | '.join(heads)} |", "|---|" + "---:|" * len(columns)]
        for shape in dict.fromkeys(t.shape for t in of_machine):
            found = {(t.direction, t.load): t for t in of_machine if t.shape == shape}
            cells = [_both(found.get(column)) for column in columns]
            lines.append(f"| {shape} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _both(t: Timing | None) -> str:
    best = best_peer(t.ms) if t else None
    if t is None or best is None or t.speedup is None:
        return ""
    return f"{t.ms[best]:.2f} → {t.ms['uniep']:.2f}, **{t.speedup:.2f}x**"


def comparison(timings: list[Timing], impls: list[str]) -> str:
    """Milliseconds of these implementations, a column each; a table per machine, load and direction."""
    groups: dict[str, list[str]] = {}
    for t in timings:
        title = f"**{DIRECTIONS[t.direction].capitalize()}, {t.machine}, {t.load}, ms** (commit {t.meta['commit']})"
        names = " | ".join(NAMES.get(impl, impl) for impl in impls)
        head = f"| shape | tokens per GPU | {names} |\n|---|---:|{'---:|' * len(impls)}"
        cells = [t.shape, str(t.tokens), *(_number(t.ms.get(impl)) for impl in impls)]
        groups.setdefault(f"{title}\n\n{head}", []).append(f"| {' | '.join(cells)} |")
    return "\n".join("\n".join([head, *lines, ""]) for head, lines in groups.items())


def products(path: Path) -> str:
    """Of a file of products.py: a row per shape, a column per product; ms, and how much longer PyTorch's takes."""
    content = json.loads(path.read_text())
    names = list(dict.fromkeys(row["product"] for row in content["products"]))
    lines = []
    for load_name, suffix in (("window", "_ms"), ("sustained", "_sustained_ms")):
        of_shape: dict[str, list[str]] = {}
        for row in content["products"]:
            own, other = row["uniep" + suffix], row["grouped_mm" + suffix]
            of_shape.setdefault(row["shape"], []).append(f"{own:.3f}, {other / own:.2f}x")
        lines += [f"**{load_name}**", "", f"| shape | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
        lines += [f"| {shape} | {' | '.join(cells)} |" for shape, cells in of_shape.items()] + [""]
    return "\n".join(lines)


def worth(path: Path) -> str:
    """Of a file of worth.py: a table for each direction and load, speedup that of tuned over the best peer; then what
    was chosen from how many points, and of ablations the first MOST_COSTS."""
    meta, searches, rows = of_worth(path)
    about = f"{machine_of(meta)} (commit {meta['commit']}, {meta['date'][:10]})"
    lines: list[str] = []
    for direction, load_name in dict.fromkeys((row["direction"], row["load"]) for row in rows):
        lines += [f"**{DIRECTIONS[direction].capitalize()}, {load_name}, {about}**", ""]
        heads = ["shape", "tokens per GPU", *(f"{name} ms" for name in ("default", "tuned"))]
        heads += ["gain", *(f"best {name} ms" for name in ("strategy", "peer")), "speedup"]
        lines += [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
        for row in rows:
            if (row["direction"], row["load"]) != (direction, load_name):
                continue
            others = [
                f"{NAMES.get(row[kind], row[kind])} {row[f'{kind}_ms']:.3f}" if row[kind] else ""
                for kind in ("strategy", "peer")
            ]
            over = f"**{row['peer_ms'] / row['tuned']:.2f}x**" if row["peer"] else ""
            cells = [
                row["shape"], str(row["tokens"]), f"{row['default']:.3f}", f"{row['tuned']:.3f}",
                f"{row['default'] / row['tuned']:.3f}x", *others, over,
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += [
        "| shape | tokens per GPU | chosen | points tried | what other values cost there |",
        "|---|---:|---|---:|---|",
    ]
    for of in searches:
        chosen = ", ".join(f"`{name}={value}`" for name, value in of["changes"].items()) or "the default"
        costs = [
            f"`{name}={value}` {ratio - 1:+.1%}".replace("%", " %")
            for name, values in of.get("ablation", {}).items() for value, ratio in values.items()
        ]  # fmt: skip
        cells = [of["shape"], str(of["tokens"]), chosen, str(sum(of["tried"].values())), ", ".join(costs[:MOST_COSTS])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


MOST_COSTS = 4
"""Of one ablation in a table."""


def _number(ms: float | None, mark: bool = False) -> str:
    if ms is None:
        return ""
    return f"*{ms:.3f}*" if mark else f"{ms:.3f}"


PAGES = {
    "README.md": (short, ("h200x2_floors_2", "h200x4_floors")),
    "docs/performance.md": (
        tables,
        (
            "h200x2_floors_2", "h200x4_floors", "h200x4_tokens", "h200x4_zipf", "h200x2_layer", "h200x2_4096",
            "h200x2_zipf", "h200x2_tokens_3", "h200x2_tokens", "h200x2_sustained", "h200x4_groups", "h100x2_layer",
        ),
    ),
}  # fmt: skip
"""Pages with tables between the marks: how they are made, and the files of benchmarks/results."""


def page_text(name: str) -> str:
    """The page as it is, with its tables made anew."""
    made, files = PAGES[name]
    return insert((ROOT / name).read_text(), made(load(RESULTS / f"{file}.json" for file in files)))


def span(direction: str, files: Iterable[str], tokens: int = 4096, loads: Sequence[str] = LOADS) -> str:
    """ "1.05x to 1.37x": least and largest speedup on H200 in these files, from so many tokens per GPU on."""
    timings = load(RESULTS / f"{file}.json" for file in files)
    found = [
        t.speedup for t in timings
        if t.speedup and t.direction == direction and t.tokens >= tokens and t.load in loads and "H200" in t.machine
    ]  # fmt: skip
    return f"{min(found):.2f}x to {max(found):.2f}x"


def insert(page: str, text: str) -> str:
    """`page` with everything between the marks replaced.  Raises SystemExit if a mark is missing."""
    if BEGIN not in page or END not in page:
        raise SystemExit(f"the page needs the two lines\n{BEGIN}\n{END}")
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END, 1)[1]}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--pages", action="store_true", help="write the tables of all pages, from their files")
    parser.add_argument("--load", help="only this load, window or sustained")
    parser.add_argument("--tokens", type=int, help="only this number of tokens")
    parser.add_argument("--impl", help="compare these implementations: names, separated by commas")
    parser.add_argument("--short", action="store_true", help="one row for each shape, with both loads")
    parser.add_argument("--products", type=Path, help="print the table of a file of products.py")
    parser.add_argument("--worth", type=Path, help="print the tables of a file of worth.py")
    args = parser.parse_args(argv)
    if args.pages:
        for name in PAGES:
            (ROOT / name).write_text(page_text(name))
            print(ROOT / name)
        return
    if args.products:
        print(products(args.products))
        return
    if args.worth:
        print(worth(args.worth))
        return
    timings = [
        timing
        for timing in load(args.files)
        if args.load in (None, timing.load) and args.tokens in (None, timing.tokens)
    ]
    kind = short if args.short else tables
    text = comparison(timings, args.impl.split(",")) if args.impl else kind(timings)
    print(text)


if __name__ == "__main__":
    main()
