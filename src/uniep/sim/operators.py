"""The operators of strategies: those of the layer, those of frameworks, and how kernels keep them apart.

Frameworks run operator by operator: permute rows by expert, an all-to-all, sort by local expert, a grouped GEMM, ...
DeepEP sends each token once per rank and adds a token's rows before they return.  HyperParallel-MoE puts rows in the
order in which experts consume them, with an event per expert.

Shape suffixes: n tiles, R ranks, e local experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from uniep.schedule import Tile
from uniep.sim.problem import Problem, to_peer
from uniep.taskflow.graph import Block, lexsort, ranges
from uniep.taskflow.layer import backward_operators, forward_operators
from uniep.taskflow.operators import Access, Operator, Operators, Pairs, Work, returns, rows_of
from uniep.taskflow.order import places
from uniep.taskflow.site import Site, blocks, steps
from uniep.way import Way

PIECE = 128
"""Rows per tile of a pass over memory, and per put ([R] tasks/: 128-row puts)."""


# --- splits ---


def _expert_rows(site: Site) -> Tensor:
    return site.row_tiles(Tile(rows=PIECE, columns=site.cfg.hidden, group_rows=1), site.cfg.hidden)


def _own_rows(site: Site) -> Tensor:
    """The rows of this rank's tokens, one row per slot, split into pieces."""
    first, last = steps(site.tokens * site.cfg.top_k, PIECE)
    zero = torch.zeros_like(first)
    return blocks(zero, first, last, zero, torch.full_like(first, site.cfg.hidden))


def _own_tokens(site: Site) -> Tensor:
    first, last = steps(site.tokens, site.way.chunk_tokens)
    zero = torch.zeros_like(first)
    return blocks(zero, first, last, zero, zero + 1)


def _covered(split: Callable[[Site], Tensor]) -> Callable[[Site], tuple[Block, ...]]:
    """The rectangles covered by consecutive tiles."""

    def covers(site: Site) -> tuple[Block, ...]:
        tiles = split(site)
        return tuple(
            Block(group, int(of[:, 1].min()), int(of[:, 2].max()), 0, int(of[0, 4]))
            for group in torch.unique(tiles[:, 0]).tolist()
            for of in (tiles[tiles[:, 0] == group],)
        )

    return covers


def _rows_to(site: Site) -> Tensor:
    """(R, e): rows of this rank's tokens for each expert of each rank."""
    return site.plan.counts_RE[site.rank].long().view(site.ep_size, -1)


def _peers_in_turn(site: Site) -> Tensor:
    """Ranks in order, starting with the next one; this rank last."""
    return (site.rank + 1 + torch.arange(site.ep_size)) % site.ep_size


def _one_each(count: Callable[[Site], Tensor]) -> Callable[[Site], Tensor]:
    """One tile per rank, of as many rows as `count` says."""

    def split(site: Site) -> Tensor:
        count_R, peer = count(site).long(), _peers_in_turn(site)
        peer = peer[count_R[peer] > 0]
        zero = torch.zeros_like(peer)
        return blocks(peer, zero, count_R[peer], zero, torch.full_like(peer, site.cfg.hidden))

    return split


def _rows_came(site: Site) -> Tensor:
    """(R,): rows on this rank that belong to each rank's tokens."""
    local = len(site.start_e1) - 1
    return site.plan.counts_RE[:, site.rank * local : (site.rank + 1) * local].sum(1)


def _rows_sent(site: Site) -> Tensor:
    """(R,): rows of this rank's tokens on each rank."""
    return _rows_to(site).sum(1)


def _tokens_came(site: Site) -> Tensor:
    return site.plan.recv_count_R


def _tokens_sent(site: Site) -> Tensor:
    return site.plan.send_count_R


def _puts(site: Site) -> Tensor:
    """Rows in pieces, in the order in which experts consume them: expert, then peer, the next rank's first."""
    count_Re, peer_R = _rows_to(site), _peers_in_turn(site)
    end_Re = count_Re.cumsum(1)
    count_eR, end_eR = count_Re[peer_R].T.flatten(), end_Re[peer_R].T.flatten()
    pieces = -(-count_eR // PIECE)
    step_n = ranges(torch.zeros_like(pieces), pieces) * PIECE
    first_n = (end_eR - count_eR).repeat_interleave(pieces) + step_n
    last_n = torch.minimum(first_n + PIECE, end_eR.repeat_interleave(pieces))
    peer_n = peer_R.repeat(count_Re.shape[1]).repeat_interleave(pieces)
    zero = torch.zeros_like(peer_n)
    return blocks(peer_n, first_n, last_n, zero, torch.full_like(peer_n, site.cfg.hidden))


# --- accesses ---


def _put_to(one_event: bool) -> Callable[[Site, Tensor], Pairs]:
    """Arrival for the expert that a put is for, or, with one event, for all."""

    def pairs(site: Site, tiles: Tensor) -> Pairs:
        index, end_Re = torch.arange(len(tiles)), _rows_to(site).cumsum(1)
        expert_n = (tiles[:, 1, None] >= end_Re[tiles[:, 0]]).sum(1)
        return Pairs(index, index, tiles[:, 0], expert_n * (not one_event))

    return pairs


def _for_expert(one_event: bool) -> Callable[[Site, Tensor], Pairs]:
    def pairs(site: Site, tiles: Tensor) -> Pairs:
        group = torch.unique(tiles[:, 0])
        group = group[site.start_e1.diff()[group] > 0]  # other experts have tiles of zeros, which wait for nothing
        return Pairs(tiles[:, 0], group, torch.full_like(group, site.rank), group * (not one_event))

    return pairs


def _from_all(counts: Callable[[Site], Tensor]) -> Callable[[Site, Tensor], Pairs]:
    """Arrival from all ranks whose count is not 0."""

    def pairs(site: Site, tiles: Tensor) -> Pairs:
        source = torch.nonzero(counts(site) > 0).flatten()
        zero = torch.zeros_like(source)
        return Pairs(torch.zeros(len(tiles), dtype=torch.int64), zero, zero + site.rank, source * site.chunks)

    return pairs


# --- work ---


def _moved(passes: float, fixed: Callable[[Site], float] = lambda site: 0.0) -> Work:
    """Elementwise tiles of rows: `passes` of their bytes, and `fixed` bytes of all tiles together."""

    def work(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
        area = (tiles[:, 2] - tiles[:, 1]) * (tiles[:, 4] - tiles[:, 3])
        moved = passes * area * site.cfg.dtype.itemsize + fixed(site) * area / area.sum().clamp(min=1)
        return 0, moved.round().long(), 0

    return work


def _send(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
    """Rows read and, at the peer, written; to the tile's group."""
    moved = (tiles[:, 2] - tiles[:, 1]) * (tiles[:, 4] - tiles[:, 3]) * site.cfg.dtype.itemsize
    return 0, 2 * moved, torch.where(tiles[:, 0] != site.rank, moved, 0)


def _return_rows(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
    moved = (tiles[:, 2] - tiles[:, 1]) * site.cfg.hidden * site.cfg.dtype.itemsize
    return 0, 2 * moved, site.away(tiles) * site.cfg.hidden * site.cfg.dtype.itemsize


def _token_bytes(site: Site) -> float:
    return site.tokens * site.cfg.hidden * site.cfg.dtype.itemsize


def _rank_tokens(site: Site) -> float:
    """Bytes of the tokens that have rows on this rank, each once."""
    here = int((site.plan.recv_count_R).sum()) + site.tokens * site.cfg.wanted(site.ep_size)
    return here * site.cfg.hidden * site.cfg.dtype.itemsize


def _sum_work(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
    """Every slot of a token read, the token written."""
    return 0, (tiles[:, 2] - tiles[:, 1]) * (site.cfg.top_k + 1) * site.cfg.hidden * site.cfg.dtype.itemsize, 0


def _ranks_sum(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
    """For each token, one row per rank that has it is read, and the token is written."""
    rows = int(site.plan.send_count_R.sum()) / max(site.tokens, 1) + 2
    bytes_n = (tiles[:, 2] - tiles[:, 1]) * rows * site.cfg.hidden * site.cfg.dtype.itemsize
    return 0, bytes_n.round().long(), 0


def pass_over(
    name: str, split: Callable[[Site], Tensor], work: Work, reads: tuple[Access, ...] = (), where: str = "expert"
) -> Operator:
    """An elementwise operator of a framework."""
    return Operator(name, "vector", split, _covered(split), reads=reads, work=work, where=where)  # type: ignore[arg-type]


def collective(name: str, rows: Callable[[Site], Tensor], stage: str) -> Operator:
    """A collective: one tile per peer, of `rows(site)[peer]` rows; peers see what it sends when it ends."""
    split = _one_each(rows)
    return Operator(name, "vector", split, _covered(split), writes=(Access(stage, to_peer),), work=_send, where="first")


COLLECTIVES = ("dispatch", "forward", "gather", "return")
"""Operators that run at the speed of collectives, not of one-sided stores."""

_ARRIVED = (Access("arrived", _from_all(_rows_came)),)
_RETURNED = (Access("returned", _from_all(_rows_sent)),)
RESIDUAL = "residual"


def _bare(op: Operator, **changes: object) -> Operator:
    """The operator without accesses: kernels give its order."""
    return dataclasses.replace(op, **{"reads": (), "writes": (), **changes})  # type: ignore[arg-type]


def _products(problem: Problem, way: Way, activation_passes: tuple[int, int]) -> list[Operator]:
    """The GEMMs and the activation between them, without accesses, in the order in which frameworks run them."""
    way = dataclasses.replace(way, separate=True, separate_gradient=True, returns="epilogue")
    if problem.direction == "fwd":
        made = forward_operators(way, keep=False)
        return [
            _bare(made["gate_up"]),
            _bare(made["activation"], work=_moved(activation_passes[0])),
            _bare(_unsent(made["down"])),
        ]
    made = backward_operators(way)
    return [
        _bare(made["down_grad"]),
        _bare(made["activation_gradient"], work=_moved(activation_passes[1])),
        _bare(_unsent(made["gate_up_grad"])),
        _bare(made["down_wgrad"]),
        _bare(made["gate_up_wgrad"]),
    ]


def _unsent(op: Operator) -> Operator:
    """The GEMM whose epilogue would return rows, but with rows that stay on this rank."""
    whole = op.work

    def work(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
        return *whole(site, tiles)[:2], 0

    return dataclasses.replace(op, work=work)


def serialized(problem: Problem, way: Way) -> Operators:
    """Operator by operator, as frameworks run the layer."""
    layer = problem.covers == "layer"
    middle = _products(problem, way, FRAMEWORK_PASSES)
    residual = [residual_of(_expert_rows)] if problem.direction == "bwd" else []
    return Operators(
        [
            *([pass_over("permute", _own_rows, _moved(1, _token_bytes), where="first")] if layer else []),
            collective("dispatch", _rows_sent, "arrived"),
            pass_over("sort", _expert_rows, _moved(2), _ARRIVED),
            *middle,
            *residual,
            pass_over("unsort", _expert_rows, _moved(2)),
            collective("return", _rows_came, "returned"),
            *([pass_over("unpermute", _own_tokens, _sum_work, _RETURNED, "last")] if layer else []),
        ]
    )


FRAMEWORK_PASSES = (3, 5)
"""Passes over memory of the activation (gate and up read, its result written) and of its gradient (gate, up and the
gradient of its result read, those of gate and up written), each of F columns."""


def residual_of(split: Callable[[Site], Tensor], reads: tuple[Access, ...] = ()) -> Operator:
    """The time that no operator accounts for; its length comes from the machine."""
    return Operator(RESIDUAL, "vector", split, _covered(split), reads=reads, where="expert")


def deepep(problem: Problem, way: Way) -> Operators:
    """Each token goes once to each rank; rows are expanded and later added there: DeepEP's normal mode."""
    middle = _products(problem, way, FRAMEWORK_PASSES)
    returned = (Access("returned", _from_all(_tokens_sent)),)
    return Operators(
        [
            collective("dispatch", _tokens_sent, "arrived"),
            pass_over("permute", _expert_rows, _moved(1, _rank_tokens), (Access("arrived", _from_all(_tokens_came)),)),
            *middle,
            *([residual_of(_expert_rows)] if problem.direction == "bwd" else []),
            pass_over("unpermute", _expert_rows, _moved(1, _rank_tokens)),
            collective("return", _tokens_came, "returned"),
            *([pass_over("combine", _own_tokens, _ranks_sum, returned, "last")] if problem.covers == "layer" else []),
        ]
    )


def hierarchical(problem: Problem, way: Way, per_node: int) -> Operators:
    """Each token goes once to each node, to the rank with the same index there, which forwards it to the ranks that
    need it.  On the way back, rows are added per rank, then per node, and cross the network once per node: DeepEP's
    mode between nodes.

    A rank forwards other ranks' tokens.  Their number is taken from its own tokens, since by symmetry it is the same.
    """

    def near(site: Site) -> Tensor:
        """(R,): ranks of this node."""
        return torch.arange(site.ep_size) // per_node == site.rank // per_node

    def across(site: Site) -> Tensor:
        """(R,): tokens for the ranks of this node and, at the rank with the same index, for each other node."""
        count_R, is_near = site.plan.send_count_R.long(), near(site)
        out = torch.where(is_near, count_R, 0)
        for node in range(site.ep_size // per_node):
            ranks = slice(node * per_node, (node + 1) * per_node)
            if not bool(is_near[ranks].any()):
                tokens = torch.unique(site.plan.send_token_RT[ranks])
                out[node * per_node + site.rank % per_node] = int((tokens >= 0).sum())
        return out

    def inside(site: Site) -> Tensor:
        """(R,): tokens of other nodes forwarded to each rank of this one."""
        count_R = torch.where(near(site), 0, site.plan.send_count_R.long())
        of_place = count_R.view(-1, per_node).sum(0)
        of_place[site.rank % per_node] = 0
        out = torch.zeros_like(count_R)
        first = site.rank // per_node * per_node
        out[first : first + per_node] = of_place
        return out

    def rows_between(site: Site) -> Tensor:
        """(R, nodes, places): rows of each rank's tokens on each rank."""
        return site.plan.counts_RE.view(site.ep_size, site.ep_size, -1).sum(2).view(site.ep_size, -1, per_node)

    def across_came(site: Site) -> Tensor:
        """(R,): not 0 for ranks from which `across` sends something here."""
        home, place = divmod(site.rank, per_node)
        same_place = torch.arange(site.ep_size) % per_node == place
        return torch.where(near(site), site.plan.recv_count_R, same_place * rows_between(site)[:, home].sum(1))

    def inside_came(site: Site) -> Tensor:
        home, place = divmod(site.rank, per_node)
        rows = rows_between(site)[:, :, place]
        is_peer = near(site) & (torch.arange(site.ep_size) != site.rank)
        return is_peer * (rows.sum(1) - rows[:, home])

    middle = _products(problem, way, FRAMEWORK_PASSES)
    arrived, forwarded = Access("arrived", _from_all(across_came)), Access("forwarded", _from_all(inside_came))
    gathered, returned = Access("gathered", _from_all(inside_came)), Access("returned", _from_all(across_came))
    forward, gather = collective("forward", inside, "forwarded"), collective("gather", inside, "gathered")
    return Operators(
        [
            collective("dispatch", across, "arrived"),
            dataclasses.replace(forward, reads=(arrived,)),
            pass_over("permute", _expert_rows, _moved(1, _rank_tokens), (arrived, forwarded)),
            *middle,
            *([residual_of(_expert_rows)] if problem.direction == "bwd" else []),
            pass_over("unpermute", _expert_rows, _moved(1, _rank_tokens)),
            gather,
            dataclasses.replace(collective("return", across, "returned"), reads=(gathered,)),
            *(
                [pass_over("combine", _own_tokens, _ranks_sum, (returned,), "last")]
                if problem.covers == "layer"
                else []
            ),
        ]
    )


def taskflow(problem: Problem, way: Way, *, separate: bool, one_event: bool = False) -> Operators:
    """HyperParallel-MoE's operators: rows are put in the order in which experts consume them, one event per expert.

    separate: vector workers are separate units that run activations and return rows; else these are epilogues.
    one_event: one event for the whole dispatch.
    """
    arrived = (Access("arrived", _for_expert(one_event)),)
    put = Operator(
        "put", "vector", _puts, _covered(_puts), writes=(Access("arrived", _put_to(one_event)),), work=_send,
        where="first",
    )  # fmt: skip
    way = dataclasses.replace(
        way, separate=separate, separate_gradient=separate or way.device_tiles, returns="epilogue"
    )
    forward = problem.direction == "fwd"
    made = forward_operators(way, keep=False) if forward else backward_operators(way)
    left_out = {"push", "dweight", "collect", *(("combine",) if problem.covers != "layer" else ())}
    operators: list[Operator] = [put]
    for op in made:
        if op.name in left_out:
            continue
        if op.name in ("gate_up", "down_grad"):
            op = dataclasses.replace(op, reads=arrived)
        elif op.name in ("activation", "activation_gradient"):
            op = dataclasses.replace(op, work=_moved(FRAMEWORK_PASSES[not forward]))
        elif op.name == "down_wgrad":
            op = dataclasses.replace(op, reads=arrived)  # reads the activation that the forward kept
        elif op.name in ("down", "gate_up_grad") and separate:
            product, op = _sent_apart(op)
            operators.append(product)
        operators.append(op)
    if not forward and separate:
        made_by = Access("activation_gradient", rows_of(lambda way: way.gate_up.rows))
        operators.append(residual_of(_expert_rows, (made_by,)))
    return Operators(operators)


def _sent_apart(product: Operator) -> tuple[Operator, Operator]:
    """The product whose epilogue returns rows, split in two: a product that keeps them, and a pass that sends them."""
    rows = rows_of(lambda way: way.down.rows)
    send = Operator(
        "put_back", "vector", _expert_rows, _covered_rows, reads=(Access(product.name, rows),), writes=product.writes,
        work=_return_rows, lag=1,
    )  # fmt: skip
    return dataclasses.replace(_unsent(product), writes=(Access(product.name, rows),)), send


def rows_sent_apart(operators: Operators) -> Operators:
    """Epilogues do not store rows at their ranks: a separate pass does."""
    made: list[Operator] = []
    for op in operators:
        returning = op.name in ("down", "gate_up_grad") and any(access.pairs is returns for access in op.writes)
        made += _sent_apart(op) if returning else [op]
    return Operators(made)


def _covered_rows(site: Site) -> tuple[Block, ...]:
    return site.segments(site.cfg.hidden)


def sent_whole(operators: Operators) -> Operators:
    """The operators when copy engines send every token to every peer."""

    def work(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
        count_R = site.plan.send_count_R.double().clamp(min=1)
        more_n = site.tokens / count_R[tiles[:, 0]]
        return [(torch.as_tensor(part) * more_n).round().long() for part in operators["push"].work(site, tiles)]

    return Operators([dataclasses.replace(op, work=work) if op.name == "push" else op for op in operators])


PART = "part of gate_up"


def in_parts(operators: Operators) -> Operators:
    """When gate_up of a part of the row tiles is done, its down product begins, and gate_up of the next part."""

    def pairs(site: Site, tiles: Tensor) -> Pairs:
        inside_n = places(operators, operators["gate_up"], site, tiles)[:, 2]
        row_M, tile_n = torch.unique(tiles[:, 1], return_inverse=True)
        inside_M = torch.zeros_like(row_M).scatter_(0, tile_n, inside_n)
        position_M = lexsort(row_M, inside_M).argsort()
        part_n = ((position_M + 1) * site.way.gate_up_parts - 1)[tile_n] // max(len(row_M), 1)
        used = torch.unique(part_n)
        return Pairs(torch.searchsorted(used, part_n), torch.arange(len(used)), torch.full_like(used, site.rank), used)

    def before(site: Site, tiles: Tensor) -> Pairs:
        made = pairs(site, tiles)
        return made._replace(group_P=made.group_P[1:], rank_P=made.rank_P[1:], number_P=made.number_P[:-1])

    def with_parts(op: Operator) -> Operator:
        if op.name == "gate_up":
            here, earlier = Access(PART, pairs), Access(PART, before)
            return dataclasses.replace(op, reads=(*op.reads, earlier), writes=(*op.writes, here))
        return dataclasses.replace(op, reads=(*op.reads, Access(PART, pairs))) if op.name == "down" else op

    return Operators(list(map(with_parts, operators)))


def kept_in_pieces(operators: Operators) -> Operators:
    """Received tokens are copied out by many workers."""

    def split(site: Site) -> Tensor:
        tiles, count_R = [], site.plan.recv_count_R.tolist()
        for peer in _peers_in_turn(site).tolist():
            first, last = steps(count_R[peer], site.way.chunk_tokens)
            zero = torch.zeros_like(first)
            tiles.append(blocks(zero + peer, first, last, zero, zero + site.cfg.hidden))
        return torch.cat(tiles)

    return Operators([dataclasses.replace(op, split=split) if op.name == "keep" else op for op in operators])
