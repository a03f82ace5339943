"""Time a process's first step: with nothing compiled, and with the caches of a process before it.

    python benchmarks/first.py --json FILE                                        # one rank
    python benchmarks/first.py --ranks 2 --tokens 8192,512                        # a GPU each

For each number of tokens, in a folder of its own for Triton's cache, a process for each way: "compiled", with an empty
cache; "again", with what it left.  Seconds: import, Workspace, the first forward + backward, the second one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("compiled", "again")


def step(shape_name: str, tokens: int) -> dict[str, float]:
    """One rank's seconds, in a process of its own."""
    began = time.perf_counter()
    import torch
    import torch.distributed as dist

    import timing
    import uniep
    from cases import make_case, make_weights, parse_shape
    from layers import UniEPLayer

    device, _ = timing.start_ranks("cuda", 600)
    shape, rank, ranks = parse_shape(shape_name), dist.get_rank(), dist.get_world_size()
    weights = make_weights(shape, rank, ranks, torch.bfloat16, device)
    case = make_case(shape, tokens, "balanced", rank, weights)
    torch.cuda.synchronize()
    found = {"import": time.perf_counter() - began}

    def timed(name: str, call: Any) -> Any:
        start = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        found[name] = time.perf_counter() - start
        return result

    workspace = timed("workspace", lambda: uniep.Workspace(shape.config(ranks, tokens), dist.group.WORLD))
    layer = UniEPLayer(workspace)
    layer.prepare(case, True)
    for name in ("first", "second"):
        timed(name, lambda: layer.forward_backward(case))
    layer.check()
    dist.destroy_process_group()
    return {name: round(seconds, 3) for name, seconds in found.items()}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="qwen3-30b", help="a name, or DxFxExK (default %(default)s)")
    made.add_argument("--tokens", default="8192", help="a list (default %(default)s)")
    made.add_argument("--ranks", type=int, default=1)
    made.add_argument("--json", metavar="FILE")
    made.add_argument("--commit", help="recorded in the file")
    made.add_argument("--step", action="store_true", help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.step:
        found = step(args.shape, int(args.tokens))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found), flush=True)
        return
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens.split(","):
        with tempfile.TemporaryDirectory() as folder:
            for way in WAYS:
                environment = os.environ | {"TRITON_CACHE_DIR": folder}
                launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
                command = [sys.executable, *launcher, __file__, "--step", "--shape", args.shape, "--tokens", tokens]
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                row = {"shape": args.shape, "tokens": int(tokens), "ranks": args.ranks, "way": way}
                rows.append(row | json.loads(done.stdout.splitlines()[-1]))
                print(" ".join(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
    if args.json:
        import torch

        from moe import of_run

        meta = {**of_run("first.py", torch.device("cuda"), args.commit, args.ranks), "cores": os.cpu_count()}
        Path(args.json).write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
