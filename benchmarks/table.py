"""Markdown tables from result files, printed or written between two marks of a README.

python benchmarks/table.py benchmarks/results/*.json --readme README.md
python benchmarks/table.py benchmarks/results/h200x[24]_both.json --short --readme README.md
python benchmarks/table.py benchmarks/results/h200x2_groups.json --impl uniep,uniep-groups,deepep-nowait
python benchmarks/table.py --products benchmarks/results/h200_products.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from results import DIRECTIONS, PEERS, Timing, best_peer, load

LOADS = {"window": "one call", "sustained": "under load"}
BEGIN, END = "<!-- benchmarks: begin (benchmarks/table.py writes this part) -->", "<!-- benchmarks: end -->"


def tables(timings: list[Timing]) -> str:
    """One table per machine, load and direction; the best peer's time is in italics."""
    groups: dict[tuple[str, str, str], list[Timing]] = {}
    for timing in timings:
        groups.setdefault((timing.machine, timing.load, timing.direction), []).append(timing)
    return "\n".join(_table(*key, group) for key, group in groups.items())


def _table(machine: str, load_name: str, direction: str, timings: list[Timing]) -> str:
    peers = [impl for impl in PEERS if any(impl in timing.ms for timing in timings)]
    compute = any("uniep-compute" in timing.ms for timing in timings)
    head = ["shape", "tokens per GPU", "routing", *(f"{impl} ms" for impl in peers), "uniep ms", "speedup"]
    head += ["to own compute"] if compute else []
    lines = [f"**{DIRECTIONS[direction].capitalize()}, {machine}, {load_name}**", ""]
    lines += ["| " + " | ".join(head) + " |", "|---|---:|---|" + "---:|" * (len(head) - 3)]
    for timing in timings:
        ms, best = timing.ms, best_peer(timing.ms)
        cells = [timing.shape, str(timing.tokens), timing.routing]
        cells += [_number(ms.get(impl), mark=impl == best) for impl in peers]
        cells += [_number(ms.get("uniep")), f"**{timing.speedup:.2f}x**" if timing.speedup else ""]
        if compute:
            both = "uniep" in ms and "uniep-compute" in ms
            cells.append(f"{ms['uniep'] / ms['uniep-compute']:.2f}" if both else "")
        lines.append("| " + " | ".join(cells) + " |")
    metas = {(t.meta["commit"], t.meta["date"][:10], t.meta["torch"], t.meta["triton"]): None for t in timings}
    for commit, day, torch_version, triton_version in metas:
        lines += ["", f"Commit {commit}, {day}, PyTorch {torch_version}, Triton {triton_version}."]
    return "\n".join(lines) + "\n"


def short(timings: list[Timing]) -> str:
    """One table per machine, a row per shape, a column per direction and load: best peer -> uniep, ms, and speedup."""
    columns = [(direction, load_name) for direction in DIRECTIONS for load_name in LOADS]
    lines: list[str] = []
    for machine in dict.fromkeys(t.machine for t in timings):
        of_machine = [t for t in timings if t.machine == machine]
        metas = {(t.meta["commit"], t.meta["date"][:10], t.meta["torch"], t.meta["triton"]): None for t in of_machine}
        about = "; ".join(f"commit {c}, {day}, PyTorch {torch}, Triton {triton}" for c, day, torch, triton in metas)
        peers = ", ".join(dict.fromkeys(best for t in of_machine if (best := best_peer(t.ms))))
        lines += [f"**{machine}, {of_machine[0].tokens} tokens per GPU, ms: {peers} → uniep** ({about})", ""]
        heads = [f"{DIRECTIONS[direction]}, {LOADS[load_name]}" for direction, load_name in columns]
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
        head = f"| shape | tokens per GPU | {' | '.join(impls)} |\n|---|---:|{'---:|' * len(impls)}"
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


def _number(ms: float | None, mark: bool = False) -> str:
    if ms is None:
        return ""
    return f"*{ms:.3f}*" if mark else f"{ms:.3f}"


def insert(readme: str, text: str) -> str:
    """`readme` with everything between the marks replaced.  Raises SystemExit if a mark is missing."""
    if BEGIN not in readme or END not in readme:
        raise SystemExit(f"the README needs the two lines\n{BEGIN}\n{END}")
    before, rest = readme.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END, 1)[1]}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--readme", type=Path, help="write there instead of printing")
    parser.add_argument("--load", help="only this load, window or sustained")
    parser.add_argument("--tokens", type=int, help="only this number of tokens")
    parser.add_argument("--impl", help="compare these implementations: names, separated by commas")
    parser.add_argument("--short", action="store_true", help="one row for each shape, with both loads")
    parser.add_argument("--products", type=Path, help="print the table of a file of products.py")
    args = parser.parse_args(argv)
    if args.products:
        print(products(args.products))
        return
    timings = [
        timing
        for timing in load(args.files)
        if args.load in (None, timing.load) and args.tokens in (None, timing.tokens)
    ]
    kind = short if args.short else tables
    text = comparison(timings, args.impl.split(",")) if args.impl else kind(timings)
    if args.readme:
        args.readme.write_text(insert(args.readme.read_text(), text))
    else:
        print(text)


if __name__ == "__main__":
    main()
