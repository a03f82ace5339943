"""One training step in torch.profiler's trace, with the tile tasks of one of its MoE layers.

    python examples/profile_step.py --out step.json       # open it at ui.perfetto.dev

The demo's language model on the CPU backend, one rank.  The profiler's operators and the layer's tasks have one clock:
the tasks lie inside the layer's `_Direct` and `_DirectBackward`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import uniep
from uniep.cli.model import NUM_SHARDS, ModelConfig, Trainer
from uniep.cli.timeline import recording
from uniep.taskflow.trace import merge_profile


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("step.json"))
    args = made.parse_args()
    cfg = ModelConfig(layers=2, heads=2, context=64, sequences_per_shard=4, hidden=128, ffn=128, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with uniep.Workspace(cfg.moe(1), device="cpu") as workspace:
        trainer = Trainer(cfg, workspace, learning_rate=1e-3)
        for step in range(3):
            shape = (NUM_SHARDS, cfg.sequences_per_shard, cfg.context + 1)
            batch = list(torch.randint(256, shape, generator=generator))
            if step < 2:  # warm up
                trainer.step(batch)
                continue
            with profile(activities=[ProfilerActivity.CPU]) as recorded, recording(trainer.experts_of(1)) as spans:
                trainer.step(batch)
    recorded.export_chrome_trace(str(args.out))
    merge_profile(args.out, spans, args.out)
    print(f"written: {args.out}, with {len(spans)} tasks of layer 1")


if __name__ == "__main__":
    main()
