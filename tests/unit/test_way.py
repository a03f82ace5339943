"""Ways: what a call of so many tokens does, resolved once, and what of it ranks have to agree on."""

import itertools
from pathlib import Path

from uniep import MoEConfig
from uniep.shapes import SHAPES
from uniep.way import resolve

PINNED = Path(__file__).with_name("ways.txt")
MOST = 8192
TOKENS = (1, 64, 512, 4096, 8192)


def config(shape, most=MOST, **changes):
    sizes = {"hidden": shape.hidden, "ffn": shape.ffn, "num_experts": shape.num_experts, "top_k": shape.top_k}
    return MoEConfig(**sizes, max_tokens_per_rank=most, **changes)


def described(cfg, ep_size, num_tokens):
    """What kernels of the default way are told, in one line."""
    way = resolve(cfg, ep_size, num_tokens)
    how = f"down:{way.down_sms} gradient:{'beside' if way.gradient_beside else 'after'}"
    numbers = " rounds:{},{} leads:{},{}".format(*way.push_rounds, *way.leads)
    sent = ("copy" if way.copies else way.transfer) if ep_size > 1 else "none"
    return (
        f"{'mega' if way.mega else how} {sent} programs:{way.push_programs}{'' if way.mega else numbers} "
        f"rows:{way.gemm1.group_rows},{way.gemm2.group_rows}"
    )


def defaults():
    """A line for each shape, number of ranks, and tokens of a rank of the most there may be."""
    for shape, ep_size in itertools.product(SHAPES.values(), (1, 2, 4, 8)):
        if shape.per_rank:
            continue
        for num_tokens, most in [(t, MOST) for t in TOKENS] + [(t, t) for t in TOKENS[:-1]]:
            for groups in (None, ep_size) if most == MOST and num_tokens in (1, 4096, 8192) else (None,):
                cfg = config(shape, most, combine_groups=groups)
                what = described(cfg, ep_size, num_tokens)
                yield f"{shape.name} ep:{ep_size}{' groups' if groups else ''} T:{num_tokens}/{most} {what}"


def test_default_ways_are_the_pinned_ones():
    """Made by the code that chose call by call; whoever changes a default sees here what else it changes."""
    assert list(defaults()) == PINNED.read_text().splitlines()
