"""Two source trees of uniep in turn on the same GPUs: is one slower than the other?

    git worktree add /tmp/old COMMIT
    python benchmarks/paired.py --old /tmp/old --json benchmarks/results/paired.json

Each tree runs in processes of its own, one per GPU, that stay alive; only one tree computes at a time.  A pair is one
measurement of each, in turn old first and new first, so that drift of clocks and temperature meets both alike.  What
counts is the ratio new / old within a pair: its median, and the 95 % interval of the median by order statistics.

"as fast": the median is at most 1.01, or the interval contains 1.00 and is at most 0.02 wide.  Pairs are added, up to
--most-pairs, while neither holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LEAST_PAIRS = 9
DEFAULT_CASES = "qwen3-30b:8192,dsv2-lite:8192,qwen3-235b:8192,deepseek-v3:8192,mixtral-8x7b:8192,qwen3-30b:512"


# ------------------------------------------------------------------------------------------------ one tree's processes


def work(args: argparse.Namespace) -> None:
    """A rank of one tree: measures what the controller asks for, until it is told to stop."""
    import torch
    import torch.distributed as dist

    import timing
    import uniep

    if (own := Path(args.tree) / "benchmarks" / "cases.py").exists():
        sys.path.insert(0, str(own.parent))  # what is timed may be called otherwise there
    from cases import make_case, make_weights, parse_shape
    from layers import UniEPLayer

    assert str(Path(uniep.__file__).resolve()).startswith(str(Path(args.tree).resolve())), uniep.__file__
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, control = timing.start_ranks(args.device, 600)
    stream: Any = socket.create_connection(("127.0.0.1", args.port)).makefile("rw") if rank == 0 else None
    workspace, layer, case = None, None, None

    def answer(value: Any) -> None:
        if rank == 0:
            stream.write(json.dumps(value) + "\n")
            stream.flush()

    answer({"tree": args.name, "card": torch.cuda.get_device_name() if args.device == "cuda" else "CPU"})
    while True:
        told: list[Any] = [json.loads(stream.readline()) if rank == 0 else None]
        dist.broadcast_object_list(told, 0, group=control)
        order = told[0]
        if order["do"] == "stop":
            break
        if order["do"] == "case":
            if workspace is not None:
                workspace.close()
            workspace = layer = case = None
            if device.type == "cuda":
                torch.cuda.empty_cache()
            shape, tokens = parse_shape(order["shape"]), order["tokens"]
            dtype = torch.bfloat16
            case = make_case(shape, tokens, "balanced", rank, make_weights(shape, rank, ranks, dtype, device))
            cfg = uniep.MoEConfig(
                hidden=shape.hidden, ffn=shape.ffn, num_experts=shape.num_experts, top_k=shape.top_k,
                max_tokens_per_rank=tokens, max_rows=2 * tokens * shape.top_k if order["mode"] == "sync-free" else None,
            )  # fmt: skip
            workspace = uniep.Workspace(cfg, dist.group.WORLD, device=device, timeout_s=120)
            layer = UniEPLayer(workspace)
            layer.prepare(case, True)
            for call in (layer.forward, layer.forward_backward):
                for _ in range(3):
                    call(case)
            timing.synchronize()
            layer.check()
            answer("ready")
            continue
        assert layer is not None and case is not None
        run = layer.forward if order["direction"] == "fwd" else layer.forward_backward

        def call(run: Any = run, case: Any = case) -> object:
            return run(case)

        for _ in range(2):
            call()
        if order["load"] == "window":
            times = timing.max_over_ranks([timing.window(call) for _ in range(args.calls)])
        else:
            times = timing.max_over_ranks([timing.sustained(call, args.sustained_s)])
        timing.synchronize()
        layer.check()
        answer(statistics.median(times))
    if workspace is not None:
        workspace.close()
    dist.barrier(control)
    dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------- the controller


class Tree:
    """The processes of one source tree, and the line to their first rank."""

    def __init__(self, name: str, folder: str, port: int, args: argparse.Namespace) -> None:
        self.name = name
        source = str(Path(folder).resolve())
        env = os.environ | {"PYTHONPATH": os.pathsep.join((f"{source}/src", str(HERE)))}
        own = [
            str(HERE / "paired.py"), "--work", "--tree", source, "--name", name, "--port", str(port),
            "--device", args.device, "--calls", str(args.calls), "--sustained-s", str(args.sustained_s),
        ]  # fmt: skip
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}", *own]
        self.processes = subprocess.Popen(run, env=env)
        self.stream: Any = None

    def ask(self, **order: Any) -> Any:
        self.stream.write(json.dumps(order) + "\n")
        self.stream.flush()
        line = self.stream.readline()
        if not line:
            raise SystemExit(f"the processes of {self.name} ended; their output says why")
        return json.loads(line)

    def stop(self) -> None:
        self.stream.write(json.dumps({"do": "stop"}) + "\n")
        self.stream.flush()
        self.processes.wait(60)


def start(args: argparse.Namespace) -> tuple[list[Tree], str]:
    """Both trees' processes, connected, and the card."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(180)
        port = server.getsockname()[1]
        trees = [Tree(name, folder, port, args) for name, folder in (("old", args.old), ("new", args.new))]
        card = ""
        for _ in trees:
            stream = server.accept()[0].makefile("rw")
            hello = json.loads(stream.readline())
            next(tree for tree in trees if tree.name == hello["tree"]).stream = stream
            card = hello["card"]
    return trees, card


@dataclasses.dataclass
class Ratios:
    """new / old of every pair of one case, load and direction."""

    pairs: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(new / old for old, new in self.pairs)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the median, 95 %: the innermost order statistics that hold it as often as that."""
        ratios = sorted(new / old for old, new in self.pairs)
        count, cut = len(ratios), 0
        while 2 * sum(math.comb(count, i) for i in range(cut + 1)) / 2**count <= 0.05:
            cut += 1
        outermost = max(cut - 1, 0)
        return ratios[outermost], ratios[count - 1 - outermost]

    @property
    def as_fast(self) -> bool:
        low, high = self.interval
        return self.median <= 1.01 or (low <= 1.0 <= high and high - low <= 0.02)


def compare(trees: list[Tree], load: str, direction: str, most: int) -> Ratios:
    found = Ratios()
    while len(found.pairs) < LEAST_PAIRS or (not found.as_fast and len(found.pairs) < most):
        turn = trees if len(found.pairs) % 2 == 0 else trees[::-1]
        took = {tree.name: tree.ask(do="measure", load=load, direction=direction) for tree in turn}
        found.pairs.append((took["old"], took["new"]))
    return found


def describe(tree: str) -> str:
    """Its commit, "+" where files differ from it; or its path where that is no checkout."""
    try:
        git = ["git", "-C", tree]
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
        return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return Path(tree).name


def control(args: argparse.Namespace) -> bool:
    import torch
    import triton

    trees, card = start(args)
    rows: list[dict[str, Any]] = []
    meta = {
        "card": card, "gpus": args.gpus,
        "old": args.old_commit or describe(args.old), "new": args.new_commit or describe(args.new),
        "torch": torch.__version__, "triton": triton.__version__, "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(["benchmarks/paired.py", *sys.argv[1:]]),
    }  # fmt: skip
    for name in args.cases.split(","):
        shape, _, tokens = name.partition(":")
        for mode in args.modes.split(","):
            for tree in trees:
                tree.ask(do="case", shape=shape, tokens=int(tokens), mode=mode)
            for load in args.loads.split(","):
                for direction in args.directions.split(","):
                    found = compare(trees, load, direction, args.most_pairs)
                    low, high = found.interval
                    row = {
                        "shape": shape, "tokens": int(tokens), "mode": mode, "load": load, "direction": direction,
                        "old_ms": round(statistics.median(old for old, _ in found.pairs), 4),
                        "new_ms": round(statistics.median(new for _, new in found.pairs), 4),
                        "ratio": round(found.median, 4), "low": round(low, 4), "high": round(high, 4),
                        "pairs": len(found.pairs), "as_fast": found.as_fast,
                    }  # fmt: skip
                    rows.append(row)
                    print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
                    if args.json:
                        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
                        Path(args.json).write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    for tree in trees:
        tree.stop()
    slower = [row for row in rows if not row["as_fast"]]
    print(f"{len(rows) - len(slower)} of {len(rows)} as fast as before")
    return not slower


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--old", metavar="DIR", help="checkout to compare with")
    made.add_argument("--new", metavar="DIR", default=str(HERE.parent), help="default: this one")
    made.add_argument("--old-commit", help="recorded where DIR is no git checkout")
    made.add_argument("--new-commit", help="likewise")
    made.add_argument("--json", metavar="FILE", help="results, rewritten after every row")
    made.add_argument("--cases", default=DEFAULT_CASES, help="SHAPE:TOKENS, a list (default %(default)s)")
    made.add_argument("--modes", default="sync-free", help="sync-free, default (default %(default)s)")
    made.add_argument("--loads", default="window,sustained", help="(default %(default)s)")
    made.add_argument("--directions", default="fwd,fwd_bwd", help="(default %(default)s)")
    made.add_argument("--calls", type=int, default=5, help="window calls of a measurement (default %(default)s)")
    made.add_argument("--sustained-s", type=float, default=0.15, help="length of a sustained one (default %(default)s)")
    made.add_argument("--most-pairs", type=int, default=25, help="(default %(default)s)")
    made.add_argument("--gpus", type=int, default=2, help="ranks of each tree (default %(default)s)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--tree", "--name"):
        made.add_argument(hidden, help=argparse.SUPPRESS)
    made.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.work:
        work(args)
    elif not args.old:
        made.error("--old DIR is missing: the checkout to compare with")
    else:
        sys.exit(0 if control(args) else 1)


if __name__ == "__main__":
    main()
