"""One rank of test_calls.py: `python calls_rank.py RANK FOLDER` runs every scenario over shared memory files.

A scenario returns what this rank saw: texts of errors, whether results were NaN, seconds.
"""

import dataclasses
import faulthandler
import sys
import time
from pathlib import Path

import torch
from fused_rank import SCHEDULE

from uniep.backends.base import Inputs, LayerTag, Needs
from uniep.config import MoEConfig
from uniep.errors import UniEPError
from uniep.schedule import Schedule
from uniep.weights import ExpertWeights

RANKS = 2
CFG = MoEConfig(hidden=64, ffn=64, num_experts=4, top_k=2, max_tokens_per_rank=8, dtype=torch.float16)
SYNC_FREE = dataclasses.replace(CFG, max_rows=64)
FUSED = dataclasses.replace(SCHEDULE, push_programs=1)
MEGA = dataclasses.replace(FUSED, overlap="mega")
LONG_S = 120.0  # nothing here may wait so long
LIMIT_S = 400
NO_LAYER = LayerTag()


class Site:
    """What a scenario needs of this process."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder, self.made = rank, folder, 0

    def backend(self, cfg: MoEConfig = CFG, schedule: Schedule = FUSED, timeout_s: float = LONG_S):
        import hopper_on_host

        self.made += 1

        def memories(size: int) -> list[torch.Tensor]:
            names = [str(self.folder / f"{self.made}-{peer}") for peer in range(RANKS)]
            return [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in names]

        backend = hopper_on_host.host_backend(cfg, self.rank, RANKS, memories, schedule, timeout_s)

        def fail(cause: str) -> None:
            backend.planner.member.failures.append(cause)
            backend.planner.member.cause = cause
            backend.close()

        backend.planner.member.fail = fail
        return backend

    def inputs(self, layer: LayerTag = NO_LAYER) -> Inputs:
        make = torch.Generator().manual_seed(self.rank)
        x, w13, w2 = (torch.randn(shape, generator=make).half() for shape in ((8, 64), (2, 128, 64), (2, 64, 64)))
        ids = torch.randint(0, 4, (8, 2), generator=make)
        return Inputs(x, ids, torch.ones(8, 2), ExpertWeights((w13,), (w2,), "stacked"), layer)


def error_of(call) -> str:
    """The class and the text of what `call` raises; "" if nothing."""
    try:
        call()
    except (UniEPError, KeyboardInterrupt, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def backwards_of_different_forwards(site, schedule):
    backend, given = site.backend(schedule=schedule), site.inputs()
    saved = [backend.forward(given, save=True)[1] for _ in range(2)]
    results = []

    def run() -> None:
        got = backend.backward(torch.ones_like(given.x_TD), given, saved[site.rank], Needs())
        results.extend((got.x, got.weights, *got.w13, *got.w2))
        backend.check()

    error = error_of(run)
    return {"nan": all(bool(t.isnan().all()) for t in results), "error": error}


def gradients_on_one_rank(site):
    backend, given = site.backend(), site.inputs()
    error = error_of(lambda: backend.forward(given, save=site.rank == 0))
    return {"error": error, "afterwards": bool(backend.forward(given, save=False)[0].isfinite().all())}


def layers(site, numbers, draws=(0, 0)):
    backend, rank = site.backend(), site.rank
    given = site.inputs(LayerTag(numbers[rank], None, draws[rank]))
    error = error_of(lambda: backend.forward(given, save=False))
    backend.forward(site.inputs(), save=False)
    return {"error": error}


def digests(site, now, cfg=CFG):
    backend = site.backend(cfg)
    digest = torch.tensor([site.rank + 2**40, now[site.rank], 1])
    given = site.inputs(LayerTag(1, digest))
    first = error_of(lambda: backend.forward(given, save=False))
    checked = error_of(backend.check)
    second = error_of(lambda: backend.forward(site.inputs(LayerTag(1, digest * 0 + site.rank)), save=False))
    last = error_of(lambda: backend.forward(site.inputs(), save=False))
    return {"error": first, "checked": checked, "second": second, "last": last}


def exception_inside(site, error, schedule, direction):
    """Rank 1 fails where its kernels are being launched."""
    from uniep.launch import mega as launch_mega
    from uniep.launch import staged as launch

    backend, given = site.backend(schedule=schedule), site.inputs()
    saved = backend.forward(given, save=True)[1]
    named = {"forward": (launch, "launch_gate_up"), "backward": (launch, "launch_dweights")}
    module, name = (launch_mega, f"launch_{direction}") if schedule is MEGA else named[direction]
    usual = getattr(module, name)

    def fails(*args, **options):
        raise error

    if site.rank == 1:
        setattr(module, name, fails)
    started = time.monotonic()
    try:
        if direction == "forward":
            results = [backend.forward(given, save=False)[0]]
        else:
            got = backend.backward(torch.ones_like(given.x_TD), given, saved, Needs())
            results = [got.x, got.weights]
        raised = ""
    except BaseException as cause:
        results, raised = [], f"{type(cause).__name__}: {cause}"
    finally:
        setattr(module, name, usual)
    if not raised:
        raised = error_of(backend.check)
    all_nan = all(bool(t.isnan().all()) for t in results)
    return {"nan": all_nan, "error": raised, "s": time.monotonic() - started, "told": backend.planner.member.failures}


def left(site):
    backend, given = site.backend(SYNC_FREE), site.inputs()
    backend.forward(given, save=False)
    if site.rank == 1:
        backend.planner.member.cause = "ValueError: the data are at their end"
        backend.close()
        return {"error": "", "s": 0.0}
    started = time.monotonic()
    backend.forward(given, save=False)
    return {"error": error_of(backend.check), "s": time.monotonic() - started}


def refused_without_host_reads(site):
    """The rank that refused goes on, its peer does not."""
    backend, given = site.backend(SYNC_FREE), site.inputs()
    if site.rank == 1:
        backend.refuse(UniEPError("no such thing"))
        started = time.monotonic()
        backend.forward(given, save=False)
        return {"error": error_of(backend.check), "s": time.monotonic() - started}
    started = time.monotonic()
    y_TD = backend.forward(given, save=False)[0]
    error = error_of(lambda: backend.forward(given, save=False))
    return {"error": error, "nan": bool(y_TD.isnan().all()), "s": time.monotonic() - started}


def refused_forward_does_not_count(site):
    """Then forwards that differ."""
    backend, given = site.backend(), site.inputs()
    if site.rank == 1:
        backend.refuse(UniEPError("no such thing"))
        refused = ""
    else:
        refused = error_of(lambda: backend.forward(given, save=True))
    return {"refused": refused, "error": error_of(lambda: backend.forward(given, save=site.rank == 0))}


def workspaces_in_another_order(site):
    backends, given = [site.backend(timeout_s=5.0) for _ in range(2)], site.inputs()
    return {"error": error_of(lambda: backends[site.rank].forward(given, save=False))}


def past_the_last_number(site):
    """A step across 2**31, and across 0, has the bits of the first."""
    given, found = site.inputs(), []
    for start in (0, 2**31 - 2, -2):
        backend = site.backend(timeout_s=LONG_S)
        planner = backend.planner
        planner.call.fill_(start)
        planner.calls_made = start
        backend.arena.views["flags"].fill_(start)
        (site.folder / f"{start}-{site.rank}").touch()
        while not (site.folder / f"{start}-{1 - site.rank}").exists():
            time.sleep(0.01)
        y_TD, saved = backend.forward(given, save=True)
        got = backend.backward(torch.ones_like(given.x_TD), given, saved, Needs())
        backend.check()
        found.append([y_TD, got.x, got.weights, *got.w13, *got.w2])
    return {"same": [all(map(torch.equal, found[0], other)) for other in found[1:]], "last": planner.calls_made}


def checkpointed(site, cfg):
    """What a forward saves has the same shapes after other calls, and serves a backward as it is, moved elsewhere, or
    in part."""
    backend, found = site.backend(cfg), []
    make = torch.Generator().manual_seed(site.rank)
    given = site.inputs()
    if not cfg.gated:
        (w13,), w2 = given.experts.w13, given.experts.w2
        given = dataclasses.replace(given, experts=ExpertWeights((w13[:, :64].contiguous(),), w2, "stacked", False))
    x_TD = torch.randn(128, 64, generator=make).half()

    def inputs(ids_TK):
        return Inputs(x_TD, ids_TK, torch.ones(128, 2), given.experts, NO_LAYER)

    one = inputs(torch.tensor([[0, 3]]).expand(128, 2).contiguous())
    every = inputs(torch.stack([torch.randperm(4, generator=make)[:2] for _ in range(128)]))
    allocated = []
    for before in (0, 3):
        for _ in range(before):
            backend.forward(every, save=False)
        _, saved = backend.forward(one, save=True)
        allocated.append([t.shape for t in saved])
        found.append(backend.trimmed(saved))
    dense, moved = ([copied(t) for t in found[1]] for copied in (torch.Tensor.contiguous, torch.clone))
    large = [u if t.nbytes > 2**13 else t for t, u in zip(found[1], moved, strict=True)]
    small = [t if t.nbytes > 2**13 else u for t, u in zip(found[1], moved, strict=True)]
    gradients = []
    for kept in (saved, found[0], found[1], dense, moved, large, small):
        got = backend.backward(torch.ones_like(x_TD), one, kept, Needs())
        gradients.append([got.x, got.weights, *got.w13, *got.w2])
    backend.check()
    return {
        "shapes": [[t.shape for t in saved] for saved in found], "allocated": allocated,
        "same": [all(map(torch.equal, gradients[0], other)) for other in gradients[1:]],
    }  # fmt: skip


SCENARIOS = {
    "checkpointed": lambda site: checkpointed(site, dataclasses.replace(CFG, max_tokens_per_rank=512)),
    "checkpointed, no gate": lambda site: checkpointed(
        site, dataclasses.replace(CFG, max_tokens_per_rank=512, activation="relu2")
    ),
    "backwards": lambda site: backwards_of_different_forwards(site, FUSED),
    "layers": lambda site: layers(site, (1, 2)),
    "memory, forward": lambda site: exception_inside(site, MemoryError("2 GiB"), FUSED, "forward"),
    "order": workspaces_in_another_order,
    "wrap": past_the_last_number,
    "left": left,
    "refused": refused_without_host_reads,
    "refused, then others": refused_forward_does_not_count,
    "copies": lambda site: digests(site, (7, 7)),
    "copies, sync-free": lambda site: digests(site, (7, 7), SYNC_FREE),
    "gradients": gradients_on_one_rank,
    "interrupt, backward": lambda site: exception_inside(site, KeyboardInterrupt(), FUSED, "backward"),
    "memory, mega": lambda site: exception_inside(site, MemoryError("2 GiB"), MEGA, "forward"),
    "one known layer": lambda site: layers(site, (0, 2)),
    "draws": lambda site: layers(site, (3, 3), (5, 2**63 + 5)),
    "backwards, mega": lambda site: backwards_of_different_forwards(site, MEGA),
    "backwards, again": lambda site: backwards_of_different_forwards(
        site, dataclasses.replace(FUSED, received="again", transfer="copy")
    ),
}


def main(rank: int, folder: Path) -> None:
    import hopper_on_host

    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    hopper_on_host.interpret(ahead_ns=rank * 10**15)
    found = {}
    for name, scenario in SCENARIOS.items():
        (folder / name).mkdir(exist_ok=True)
        found[name] = scenario(Site(rank, folder / name))
        torch.save(found, folder / f"result-{rank}")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
