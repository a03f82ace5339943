"""The router kit beside its layer: what a forward's routing takes, and whether its rows depend on others.

    python benchmarks/router.py --json FILE                            # one GPU: 7168 x 2048, 256 experts, top-8

share: the router's time over that of the layer with it, forward.  softmax, losses: without and with aux and z-loss;
deepseek-v3: sigmoid, groups, selection bias.  A window sample is one call of each in turn; sustained: calls back to
back.  Before: logits of 1, 100 and all tokens are the same bits, and as near fp64 as
PyTorch's fp32.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
import torch.distributed as dist

import timing
import uniep
from cases import make_weights, parse_shape
from moe import add_file_options, of_run
from uniep.nn import Router, RouterConfig
from uniep.nn.invariant import row_products

ROUTERS = {
    "softmax": RouterConfig(),
    "deepseek-v3": RouterConfig(score="sigmoid", scale=2.5, groups=8, groups_per_token=4, selection_bias=True),
    "losses": RouterConfig(aux_loss=1e-3, z_loss=1e-3),
}


def check_products(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> dict[str, float]:
    """Raises AssertionError where a row depends on others.  {whose: largest error, in parts of sum |x||w|}."""
    logits = row_products(x_TD, weight_ED.T)
    for rows in (1, 100):
        assert torch.equal(row_products(x_TD[:rows], weight_ED.T), logits[:rows]), f"{rows} tokens alone"
    some = x_TD[:512].double()
    exact, size = some @ weight_ED.double().T, some.abs() @ weight_ED.double().abs().T
    fp32 = x_TD[:512].float() @ weight_ED.float().T
    return {name: float(((t - exact).abs() / size).max()) for name, t in (("ours", logits[:512]), ("fp32", fp32))}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="7168x2048x256x8", help="a name, or DxFxExK (default %(default)s)")
    made.add_argument("--tokens", type=int, default=8192)
    add_file_options(made)
    args = made.parse_args()
    device, _ = timing.start_ranks("cuda", 600)
    shape, ranks = parse_shape(args.shape), dist.get_world_size()
    cfg = shape.config(ranks, args.tokens, max_rows=shape.sync_free_rows(args.tokens))
    weights = make_weights(shape, dist.get_rank(), ranks, cfg.dtype, device)
    x_TD = torch.randn(args.tokens, shape.hidden, device=device, dtype=cfg.dtype)
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        weight_ED = torch.randn(shape.num_experts, shape.hidden, device=device).to(dtype) * shape.hidden**-0.5
        errors[str(dtype)] = check_products(x_TD, weight_ED)
    print(errors, flush=True)
    rows: list[dict[str, Any]] = []
    with uniep.Workspace(cfg, dist.group.WORLD, device=device, timeout_s=60) as workspace, torch.no_grad():
        for name, config in ROUTERS.items():
            router = Router(cfg, config, group=workspace, device=device)

            def layer(router: Router = router) -> torch.Tensor:
                routing = router(x_TD)
                return uniep.moe(x_TD, routing.ids_TK, routing.weights_TK, *weights, workspace=workspace)

            calls: dict[str, Any] = {"router": lambda router=router: router(x_TD), "layer": layer}
            for call in calls.values():
                for _ in range(3):
                    call()
            window: dict[str, list[float]] = {what: [] for what in calls}
            for _ in range(9):
                for what, call in calls.items():
                    window[what].append(timing.window(call))
            loads = {
                "window": {what: statistics.median(found) for what, found in window.items()},
                "sustained": {what: timing.sustained(call, 0.2) for what, call in calls.items()},
            }
            for load, ms in loads.items():
                row = {"router": name, "load": load, **{f"{what}_ms": round(t, 4) for what, t in ms.items()}}
                rows.append(row | {"share": round(ms["router"] / ms["layer"], 4)})
                print(" ".join(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
        workspace.check()
    if args.json and dist.get_rank() == 0:
        meta = of_run("router.py", device, args.commit)
        args.json.write_text(json.dumps({"meta": meta, "errors": errors, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
