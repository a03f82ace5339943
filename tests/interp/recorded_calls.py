"""A process that makes calls of the Hopper backend whose kernels are never compiled, and compares what they launch.

Prints a line for each schedule and direction: how many steps a recording has, and what a later call, with other tensors
at other addresses and of another layer, launches otherwise.  See test_recorded_calls.py.
"""

import contextlib
import dataclasses
import functools
import itertools
import types

import hopper_on_host
import torch
import triton
from own_operators import operators

from uniep import MoEConfig, Schedule
from uniep.backends.base import Inputs, LayerTag, MainGrads, Needs
from uniep.backends.hopper import link, planner, staged
from uniep.launch import driver, records
from uniep.launch.ahead import Kernel
from uniep.launch.driver import Block, Varying
from uniep.stages import Flags, stages
from uniep.weights import ExpertWeights, Lora

STREAMS = tuple(range(3))
WAYS = {
    "one kernel by threshold": (Schedule(transfer="push", mega_to=512), 300),
    "default": (None, 700),
    "serial": (Schedule(overlap="serial"), 700),
    "copied": (Schedule(transfer="copy", activation_gradient="beside", beside_from=0), 700),
    "pipelined": (Schedule(transfer="copy", overlap="pipelined", pipelined_from=0), 700),
    "parts": (Schedule(transfer="copy", overlap="pipelined", gate_up_parts=4, down_sms=0), 700),
    "parts, pushed": (Schedule(transfer="push", overlap="pipelined", gate_up_parts=2), 700),
    "expanded": (Schedule(operand="expanded", transfer="push"), 700),
    "mega, copied": (Schedule(overlap="mega", transfer="copy"), 700),
    "recomputed": (
        Schedule(transfer="copy", activation_gradient="beside", beside_from=0, preactivation="recomputed"),
        700,
    ),
    "recomputed, mega": (Schedule(overlap="mega", transfer="push", preactivation="recomputed"), 700),
    "again": (Schedule(transfer="copy", received="again"), 700),
    "again, recomputed": (Schedule(transfer="copy", received="again", preactivation="recomputed"), 700),
    "dW2 beside": (Schedule(transfer="push", down_wgrad="beside", preactivation="recomputed"), 700),
    "dW2 beside, copied": (
        Schedule(transfer="copy", down_wgrad="beside", activation_gradient="beside", beside_from=0),
        700,
    ),
    "dW2 beside, again": (Schedule(transfer="copy", down_wgrad="beside", received="again"), 700),
}


SILENT = records.FILL, records.FOLLOW
BIASED = "serial", "pipelined", "mega, copied", "groups beside", "factors"
FACTORS = {"factors": Schedule(overlap="mega"), "factors, expanded": Schedule(operand="expanded")}


class Stream:
    """Knows its handle."""

    made = 0

    def __init__(self, *_):
        Stream.made += 1
        self.cuda_stream = Stream.made

    def __getattr__(self, name):
        return lambda *_, **__: None


def install():
    hopper_on_host.install(multiprocessors=8)
    here = Stream()
    here.cuda_stream = 0
    current = [here]
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = lambda device=None: here

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            current.append(self.stream)

        def __exit__(self, *_):
            current.pop()

    torch.cuda.stream = On
    torch._C._cuda_getCurrentRawStream = lambda device: handle(current[-1])
    nothing = types.SimpleNamespace(cuLaunchKernelEx=lambda *_: 0, cuTensorMapEncodeTiled=lambda *_: 0)
    driver.libcuda = lambda: nothing
    driver._device = lambda first: 0
    driver._for_triton = lambda argument: argument
    driver.parameter_sizes = lambda kernel, compiled, args: [*sizes(args), 8, 8]
    triton.runtime.jit.JITFunction.__getitem__ = lambda kernel, grid: functools.partial(compiled, kernel)

    def copy(target, source, stream):
        if (watcher := driver.current_watcher()) is not None:
            watcher.copied(target.data_ptr(), source.data_ptr(), source.nbytes, handle(stream))

    def fill(memory, word):
        if (watcher := driver.current_watcher()) is not None:
            watcher.filled(memory.data_ptr(), word, memory.nbytes // 4, handle(current[-1]))

    def follow(later, earlier, point):
        if (watcher := driver.current_watcher()) is not None:
            watcher.followed(handle(later), handle(earlier), types.SimpleNamespace(cuda_event=1))

    link.copy, link.follow, planner.fill, staged.fill = copy, follow, fill, fill


def handle(stream):
    """Of the current stream, of that for sums, of that for copies."""
    return stream.cuda_stream and 1 + (stream.cuda_stream - 1) % 2


def sizes(args):
    for a in driver._leaves(args):
        if isinstance(a, Block):
            yield from (128, *[4] * len(a.shape), *[8] * len(a.shape))
        else:
            yield 8 if isinstance(a, driver.Memory) or a >> 31 > 0 else 4


launched = []  # what compiles, in order


def compiled(kernel, *args, **constants):
    launched.append(driver.Launch(kernel, args, constants, {}))
    blocks = [a for a in driver._leaves(args) if isinstance(a, Block)]
    facts = [{"elem_size": 2, "elem_type": 10, "block_size": list(b.block), "swizzle": 0} for b in blocks]
    metadata = types.SimpleNamespace(shared=0, num_warps=4, tensordesc_meta=facts, name=kernel.fn.__name__)
    return types.SimpleNamespace(function=1, metadata=metadata, asm={"ptx": ""})


def step(note):
    """A note without addresses and `Varying`."""
    if note[0] != records.LAUNCH:
        return note[: 3 if note[0] == records.FOLLOW else None]
    _, known, programs, values, maps, owners, stream = note
    rest = [None if i in owners or isinstance(v, bytes | Varying) else v for i, v in enumerate(values)]
    return known.compiled.metadata.name, programs, rest, maps, owners, stream


def record(backend, given, call):
    """(the result, steps, program)."""
    recording = records.Recording(given, backend.lasting(), STREAMS)
    with driver.watching(recording), records.NothingElse(recording):
        result = call()
    assert not recording.why_not, recording.why_not
    races(recording)
    return result, [step(note) for note in recording.notes], records.RecordedCall(recording)


def races(recording):
    """Streams wait for each other: all end before the call does, and what uses a gradient comes behind all before that
    uses it, or memory that was released, whose place it may take."""
    now = {stream: [0] * len(STREAMS) for stream in STREAMS}  # of each stream, what it has seen of all
    users = {}
    for kind, *note in recording.notes:
        if kind == records.FOLLOW:
            later, earlier, _ = note
            now[later] = list(map(max, now[later], now[earlier]))
            continue
        now[note[-1]][note[-1]] += 1
        owners = note[4].values() if kind == records.LAUNCH else note[: 2 if kind == records.COPY else 1]
        for base in {owner.base for owner in owners}:
            users.setdefault(base, []).append((note[-1], list(now[note[-1]])))
    assert all(now[0][stream] == now[stream][stream] for stream in STREAMS), "a stream goes on behind the call"
    first = recording.results_before_release
    for number in range(len(recording.results) if first is None else first, len(recording.results)):
        of_both = [*users.get(("brief", 0), ()), *users[("result", number)]]
        for (stream, seen), (_, later) in itertools.pairwise(of_both):
            assert later[stream] >= seen[stream], f"result {number} is used by streams that do not wait for each other"


def joined_before_entries(backend):
    """Copies carry the number of their call, which the next entry changes: they have ended by then."""
    enter = backend.planner.enter

    def checked(*arguments):
        assert not backend._forked, "a call begins while copies of the one before may be under way"
        enter(*arguments)

    backend.planner.enter = checked


def launched_by(steps, side):
    """(kernel or copy, whether on the stream `side`) of launches, without repetitions right behind each other; and of
    each, the numbers of those that have ended when it begins."""
    made, over, before = [], {stream: set() for stream in STREAMS}, []
    for s in steps:
        if s[0] == records.FOLLOW:
            over[s[1]] |= over[s[2]]
        if s[0] in SILENT:
            continue
        this = ("copy", False) if s[0] == records.COPY else (s[0], s[-1] == side)
        if not made or made[-1] != this:
            made.append(this)
            before.append(set(over[s[-1]]))
        over[s[-1]].add(len(made) - 1)
    return made, before


def listed_by(cfg, way, direction):
    """The same of the stages, and of each launch its stage."""
    of_way = stages(cfg, way, direction.replace("main_grad", "backward"), Flags(main_grad=direction == "main_grad"))
    every = [((kernel, stage.stream == "side"), stage) for stage in of_way for kernel in stage.kernels]
    made = [this for this, before in zip(every, [None, *every], strict=False) if not before or this[0] != before[0]]
    return [launch for launch, _ in made], [stage for _, stage in made]


def too_early(of_launch, before):
    """Launches that may begin before a stage has ended that theirs waits for."""
    return [
        (stage.name, other.name)
        for number, stage in enumerate(of_launch)
        for n, other in enumerate(of_launch[:number])
        if other.name in stage.after and other is not stage and n not in before[number]
    ]


def data(cfg, tokens, number, lora):
    """Of its own addresses.  lora: with factors."""
    like = {"dtype": torch.bfloat16}
    hold.append([torch.empty(1 << (10 + (number + i) % 9)) for i in range(7)])
    x, dy = torch.zeros(tokens, 512, **like), torch.zeros(tokens, 512, **like)
    experts = ExpertWeights.zeros(cfg, 8, **like)
    if lora:
        shapes = (24, 512), (cfg.h_columns, 24), (24, cfg.ffn), (512, 24)
        a13, b13, a2, b2 = (torch.zeros(8, *shape, **like) for shape in shapes)
        experts = dataclasses.replace(experts, lora=Lora((a13, b13), (a2, b2), 2.0))
    tag = LayerTag(number, draw=number << 40 | number)
    given = Inputs(x, torch.zeros(tokens, 4, dtype=torch.int64), torch.zeros(tokens, 4), experts, tag)
    hold.append((given, dy))
    return given, dy


hold = []


def kernels(launches):
    return {Kernel.of(launch) for launch in launches}


def listed_and_launched(backend, given, dy):
    """Kernels of a forward and a backward, the second time by launches."""
    found = []
    for context in (driver.listing(), contextlib.nullcontext(launched)):
        with context as launches:
            driver._known.clear()
            launched.clear()
            _, saved = backend.forward(given, True)
            got = backend.backward(dy, given, saved, Needs())
            hold.append((saved, got))
            found.append(kernels(launches))
    return found


def calls(backend, given, dy, watched):
    """{direction: (steps, program)} of a forward and its backwards."""

    def made(tensors, call):
        if not watched:  # compiles
            return call(), [], None
        return record(backend, tensors, call)

    x, ids, weights, experts = given.x_TD, given.ids_TK, given.weights_TK, given.experts
    of_experts = *experts.tensors, *experts.factors
    (y, saved), *found = made((x, ids, weights, *of_experts), lambda: backend.forward(given, True))
    seen = {"forward": found}
    first, second = experts.trained
    into = tuple(torch.zeros(t.shape) for t in (*first, *second))
    main_grads = MainGrads(into[: len(first)], into[len(first) :], True)
    backward = functools.partial(backend.backward, dy, given, saved, Needs())
    used = dy, x, ids, *saved, *of_experts
    got, *seen["backward"] = made(used, backward)
    got_too, *seen["main_grad"] = made((*used, *into), functools.partial(backward, main_grads))
    hold.append((y, saved, got, got_too, into))
    return seen


def main():
    install()
    ways = {name: (schedule, tokens, None) for name, (schedule, tokens) in WAYS.items()}
    ways |= {how: (Schedule(group_sum=how.split()[1]), 700, 2) for how in ("groups after", "groups beside")}
    ways["groups, pipelined"] = Schedule(overlap="pipelined", transfer="copy", pipelined_from=0), 700, 2
    ways |= {name: (schedule, 700, None) for name, schedule in FACTORS.items()}
    ways["own operators"] = Schedule(overlap="mega"), 700, None
    for name, (schedule, tokens, groups) in ways.items():
        cfg = MoEConfig(
            hidden=512, ffn=264, num_experts=16, top_k=4, max_tokens_per_rank=1024, max_rows=8192,
            combine_groups=groups, bias=name in BIASED,
        )  # fmt: skip
        memories = [torch.zeros(1 << 26, dtype=torch.uint8) for _ in range(2)]
        own = operators("triton") if name == "own operators" else ()
        backend = hopper_on_host.host_backend(
            cfg, 0, 2, lambda size, m=memories: [t[:size] for t in m], schedule, operators=own
        )
        joined_before_entries(backend)
        lora = name in FACTORS
        if not own:  # which trials have none of
            listed, wanted = listed_and_launched(backend, *data(cfg, tokens, 4, lora))
            wrong = sorted(kernel.name for kernel in listed ^ wanted)
            print(f"{name}: {len(listed)} kernels listed, otherwise than launched: {wrong}", flush=True)
        _, first, second = (calls(backend, *data(cfg, tokens, n, lora), n > 1) for n in (1, 2, 3))
        for direction, (steps, program) in first.items():
            other = [(a, b) for a, b in zip(steps, second[direction][0], strict=True) if a != b]
            patches = sum(patch.place.slot >= 0 for s in program.steps for patch in s.patches[: s.num_patches])
            launches, before = launched_by(steps, handle(backend.side))
            listed, of_launch = listed_by(cfg, backend.way, direction)
            said = "launches what its stages list" if launches == listed else f"launches {launches}, not {listed}"
            said += f", too early {too_early(of_launch, before)}"
            print(f"{name}, {direction}: {said}", flush=True)
            print(f"{name}, {direction}: {len(steps)} steps, {patches} patches, differing {other}", flush=True)
        hold.clear()


if __name__ == "__main__":
    main()
