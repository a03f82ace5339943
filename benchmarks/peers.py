"""The expert-parallel MoE layers that uniep is compared with, built as strongly as their parts allow.

nccl            Megatron-style dispatcher: permute, all-to-all, reorder, experts, reorder, all-to-all, unpermute.
                One copy of the split sizes to the host, queued before the permute and waited for after it.
deepep          DeepEP's intranode dispatch and combine with a tuned Config; the host waits for the receive counts.
deepep-nowait   The same with `num_worst_tokens`: no host wait, buffers for the worst case.
liger-cute      liger-cute-kernels 0.8.5: one fused kernel for each direction, on CUTLASS and NVSHMEM.
peer-compute    Their experts alone, on rows that were received before: the bound that perfect overlap would give.

All but liger-cute share the grouped GEMM and the kernels of kernels.py.  The routing weight acts in the SwiGLU, where
it is free (liger-cute applies it, in bf16, in the combine).  Layers are explicit forward and backward functions without
autograd, which favours them.

Shape suffixes: T tokens, K slots, D hidden, F ffn, E experts, e local experts, N rows.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import timing
from cases import Case, Shape
from kernels import collect, exchange_layout, grouped_mm, reorder, sort_by_expert, spread, swiglu, swiglu_backward


class Layer:
    """What the harness times.  `forward` returns y and what a training forward keeps for backward.

    compared: whether outputs are those of the layer (compute-only bounds are not).
    phases: a list that collects (name, event) while a breakdown is taken, else None.
    """

    compared = True
    phases: list[tuple[str, Any]] | None = None

    def prepare(self, case: Case, backward: bool) -> None:
        """Called once per case, before anything is timed; `backward` if that will be timed too."""

    def forward(self, case: Case) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def forward_backward(self, case: Case) -> tuple[Tensor, ...]:
        """(y, dx, dweights, dw13, dw2), as `joined` makes it."""
        raise NotImplementedError

    def joined(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Outputs as all layers have them; not timed."""
        return outputs

    def check(self) -> None:
        """Raise errors that earlier calls deferred."""

    def mark(self, phase: str) -> None:
        if self.phases is not None:
            self.phases.append((phase, timing.record_event()))


class PeerLayer(Layer):
    """A layer with an explicit backward, and the experts that all peers share."""

    def backward(self, dy_TD: Tensor, case: Case, saved: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def forward_backward(self, case: Case) -> tuple[Tensor, ...]:
        y_TD, saved = self.forward(case)
        return y_TD, *self.backward(case.dy_TD, case, saved)

    def experts(self, x_ND: Tensor, weight_N: Tensor, end_e: Tensor, case: Case) -> tuple[Tensor, tuple[Tensor, ...]]:
        h_N2F = grouped_mm(x_ND, case.w13_e2FD.mT, end_e)
        self.mark("gate_up")
        act_NF = swiglu(h_N2F, weight_N, end_e)
        self.mark("swiglu")
        y_ND = grouped_mm(act_NF, case.w2_eDF.mT, end_e)
        self.mark("down")
        return y_ND, (x_ND, weight_N, end_e, h_N2F)

    def experts_backward(self, dy_ND: Tensor, saved: tuple[Tensor, ...], case: Case) -> tuple[Tensor, ...]:
        """(dx (N, D), dweight (N,), dw13, dw2)."""
        x_ND, weight_N, end_e, h_N2F = saved
        dact_NF = grouped_mm(dy_ND, case.w2_eDF, end_e)
        self.mark("backward down_grad")
        dh_N2F, act_NF, dweight_N = swiglu_backward(h_N2F, weight_N, dact_NF, end_e)
        self.mark("backward swiglu")
        dw2 = grouped_mm(dy_ND.t(), act_NF, end_e)
        self.mark("backward down_wgrad")
        dx_ND = grouped_mm(dh_N2F, case.w13_e2FD, end_e)
        self.mark("backward gate_up_grad")
        dw13 = grouped_mm(dh_N2F.t(), x_ND, end_e)
        self.mark("backward gate_up_wgrad")
        return dx_ND, dweight_N, dw13, dw2


class NcclLayer(PeerLayer):
    """All-to-all dispatcher over torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.host_2R: Tensor | None = None

    def forward(self, case: Case) -> tuple[Tensor, Any]:
        row_TK, count_E, _ = sort_by_expert(case.ids_TK, case.num_experts)
        count_RE = count_E.new_empty(self.ranks, case.num_experts)
        dist.all_gather_into_tensor(count_RE.view(-1), count_E, group=self.group)
        split_2R, chunks, end_e = exchange_layout(count_RE, self.rank)
        if self.host_2R is None:
            self.host_2R = torch.empty(2 * self.ranks, dtype=torch.int64, pin_memory=split_2R.is_cuda)
        self.host_2R.copy_(split_2R, non_blocking=True)
        copied = timing.record_event()
        self.mark("plan")
        sent_ND, sent_N = spread(case.x_TD, row_TK, row_TK.numel(), case.weights_TK)
        self.mark("permute")
        timing.wait_event(copied)
        splits = self.host_2R.tolist()
        plan = (row_TK, splits[: self.ranks], splits[self.ranks :], chunks)
        received = self._exchange(sent_ND, plan), self._exchange(sent_N, plan)
        self.mark("dispatch")
        x_ND, weight_N = reorder(received[0], chunks, received[1])
        self.mark("reorder")
        y_ND, saved = self.experts(x_ND, weight_N, end_e, case)
        return self._return(y_ND, None, plan)[0], (plan, saved)

    def backward(self, dy_TD: Tensor, case: Case, saved: Any) -> tuple[Tensor, ...]:
        plan, expert_saved = saved
        sent_ND, _ = spread(dy_TD, plan[0], plan[0].numel())
        self.mark("backward permute")
        received_ND = self._exchange(sent_ND, plan)
        self.mark("backward dispatch")
        dy_ND, _ = reorder(received_ND, plan[3])
        self.mark("backward reorder")
        dx_ND, dweight_N, dw13, dw2 = self.experts_backward(dy_ND, expert_saved, case)
        return *self._return(dx_ND, dweight_N, plan, "backward "), dw13, dw2

    def _exchange(self, rows: Tensor, plan: tuple, back: bool = False) -> Tensor:
        _, sends, receives, _ = plan
        if back:
            sends, receives = receives, sends
        out = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(out, rows, receives, sends, group=self.group)
        return out

    def _return(
        self, rows_ND: Tensor, value_N: Tensor | None, plan: tuple, prefix: str = ""
    ) -> tuple[Tensor, Tensor | None]:
        rows_ND, value_N = reorder(rows_ND, plan[3], value_N, back=True)
        self.mark(prefix + "reorder back")
        rows_ND = self._exchange(rows_ND, plan, back=True)
        value_N = None if value_N is None else self._exchange(value_N, plan, back=True)
        self.mark(prefix + "combine")
        out = collect(rows_ND, plan[0], value_N)
        self.mark(prefix + "unpermute")
        return out


class DeepEpLayer(PeerLayer):
    """DeepEP's dispatch and combine around the shared kernels."""

    def __init__(self, comm: DeepEp, wait: bool) -> None:
        self.comm, self.wait = comm, wait

    def prepare(self, case: Case, backward: bool) -> None:
        self.configs = self.comm.tuned(case)

    def forward(self, case: Case) -> tuple[Tensor, Any]:
        buffer, tokens = self.comm.buffer, case.x_TD.shape[0]
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.ids_TK, case.num_experts)
        self.mark("plan")
        worst = self.comm.ranks * tokens
        x_TD, ids_TK, weights_TK, counts, handle, _ = buffer.dispatch(
            case.x_TD,
            topk_idx=case.ids_TK,
            topk_weights=case.weights_TK,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            num_worst_tokens=0 if self.wait else worst,
            config=self.configs[0],
        )
        self.mark("dispatch")
        num_rows = sum(counts) if self.wait else worst * min(case.ids_TK.shape[1], case.num_local)
        row_TK, _, end_e = sort_by_expert(ids_TK, case.num_local)
        x_ND, weight_N = spread(x_TD, row_TK, num_rows, weights_TK)
        self.mark("permute")
        y_ND, saved = self.experts(x_ND, weight_N, end_e, case)
        y_TD, _ = collect(y_ND, row_TK)
        self.mark("unpermute")
        y_TD = buffer.combine(y_TD, handle, config=self.configs[1])[0]
        self.mark("combine")
        return y_TD, (row_TK, handle, saved)

    def backward(self, dy_TD: Tensor, case: Case, saved: Any) -> tuple[Tensor, ...]:
        row_TK, handle, expert_saved = saved
        dy_TD = self.comm.buffer.dispatch(dy_TD, handle=handle, config=self.configs[0])[0]
        self.mark("backward dispatch")
        dy_ND, _ = spread(dy_TD, row_TK, expert_saved[0].shape[0])
        self.mark("backward permute")
        dx_ND, dweight_N, dw13, dw2 = self.experts_backward(dy_ND, expert_saved, case)
        dx_TD, dweights_TK = collect(dx_ND, row_TK, dweight_N)
        self.mark("backward unpermute")
        dx_TD, dweights_TK, _ = self.comm.buffer.combine(
            dx_TD, handle, topk_weights=dweights_TK, config=self.configs[1]
        )
        self.mark("backward combine")
        return dx_TD, dweights_TK, dw13, dw2


class LigerLayer(PeerLayer):
    """liger-cute-kernels below its autograd.  Its gradients of gate and up are two tensors."""

    def __init__(self, liger: Liger, group: dist.ProcessGroup) -> None:
        self.ffi, self.team = liger.ffi, liger.team(group)

    def prepare(self, case: Case, backward: bool) -> None:
        """It takes int32 ids, weights in bf16, and contiguous gate and up."""
        gate, up = case.w13_e2FD.chunk(2, 1)
        self.ids_TK, self.weights_TK = case.ids_TK.int(), case.weights_TK.to(case.x_TD.dtype)
        experts = gate.contiguous(), up.contiguous(), case.w2_eDF
        self.given = self.ids_TK, self.weights_TK, *experts, case.num_experts, case.ids_TK.shape[1], self.team

    def _run(self, case: Case) -> tuple[Tensor, Any]:
        y_TD, *saved = self.ffi.moe_fused_fwd_bf16(case.x_TD, *self.given)
        self.mark("forward")
        return y_TD, saved

    def _release(self) -> None:
        """What the last forward keeps in symmetric memory, which has room for one."""
        self.ffi.moe_pop_fwd(self.team)

    def forward(self, case: Case) -> tuple[Tensor, Any]:
        y_TD, saved = self._run(case)
        self._release()
        return y_TD, saved

    def forward_backward(self, case: Case) -> tuple[Tensor, ...]:
        y_TD, saved = self._run(case)
        made = self.backward(case.dy_TD, case, saved)
        self._release()
        return y_TD, *made

    def backward(self, dy_TD: Tensor, case: Case, saved: Any) -> tuple[Tensor, ...]:
        x_rows, y_rows, offsets, slots, tiles, tile_rows = saved
        of_rows = y_rows, x_rows, slots, tiles, offsets
        dx_TD, dgate, dup, dw2, dweights_TK = self.ffi.moe_fused_bwd_bf16(dy_TD, *of_rows, *self.given, tile_rows)
        self.mark("backward")
        return dx_TD, dweights_TK, dgate, dup, dw2

    def joined(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(outputs) == 1:
            return outputs
        y_TD, dx_TD, dweights_TK, dgate, dup, dw2 = outputs
        return y_TD, dx_TD, dweights_TK, torch.cat([dgate, dup], 1), dw2


class PeerCompute(PeerLayer):
    """The peers' experts on rows that an earlier `nccl` forward received."""

    compared = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.source = NcclLayer(group)

    def prepare(self, case: Case, backward: bool) -> None:
        _, (_, (self.x_ND, self.weight_N, self.end_e, _)) = self.source.forward(case)
        self.dy_ND = torch.randn_like(self.x_ND)

    def forward(self, case: Case) -> tuple[Tensor, Any]:
        return self.experts(self.x_ND, self.weight_N, self.end_e, case)

    def backward(self, dy_TD: Tensor, case: Case, saved: Any) -> tuple[Tensor, ...]:
        return self.experts_backward(self.dy_ND, saved, case)


class DeepEp:
    """One DeepEP buffer and the Configs tuned for it.

    folder: where the package `deep_ep` lies.  hidden: the largest D that will be sent.
    """

    SMS = (24, 32, 48, 64, 96, 128)
    DISPATCH_CHUNKS = (6, 12, 24, 32)
    COMBINE_CHUNKS = (4, 6, 10, 16)
    QUEUE = 256  # tokens in a channel's receive queue

    def __init__(self, folder: str, group: dist.ProcessGroup, hidden: int) -> None:
        sys.path.insert(0, folder)
        import deep_ep

        self.make_config = deep_ep.Config
        self.ranks = dist.get_world_size(group)
        largest = self._config(max(self.SMS), min(self.DISPATCH_CHUNKS))
        self.buffer = deep_ep.Buffer(
            group, largest.get_nvl_buffer_size_hint(2 * hidden, self.ranks), explicitly_destroy=True
        )
        self.choices: dict[tuple[int, int], tuple[int, int, int]] = {}

    def _config(self, sms: int, chunk: int) -> Any:
        return self.make_config(sms, chunk, self.QUEUE, 6, 128)

    def tuned(self, case: Case) -> tuple[Any, Any]:
        """Fastest (dispatch, combine) Configs with one SM count for this D and T, all ranks alike."""
        key = case.x_TD.shape[1], case.x_TD.shape[0]
        if key not in self.choices:
            self.choices[key] = self._tune(case)
        sms, dispatch_chunk, combine_chunk = self.choices[key]
        return self._config(sms, dispatch_chunk), self._config(sms, combine_chunk)

    def _tune(self, case: Case) -> tuple[int, int, int]:
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(case.ids_TK, case.num_experts)
        trials = []
        for sms in self.SMS:
            # A handle's channels are half its SMs, so every SM count needs its own.
            received_TD, _, _, _, handle, _ = self.buffer.dispatch(
                case.x_TD,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                config=self._config(sms, 12),
            )

            def dispatch(chunk: int, sms: int = sms, handle: Any = handle) -> None:
                self.buffer.dispatch(case.x_TD, handle=handle, config=self._config(sms, chunk))

            def combine(chunk: int, sms: int = sms, handle: Any = handle, rows: Tensor = received_TD) -> None:
                self.buffer.combine(rows, handle, config=self._config(sms, chunk))

            best = []
            for step, chunks in ((dispatch, self.DISPATCH_CHUNKS), (combine, self.COMBINE_CHUNKS)):
                times = []
                for chunk in chunks:
                    step(chunk)
                    ms = [timing.window(lambda step=step, chunk=chunk: step(chunk)) for _ in range(4)]
                    times.append(statistics.median(timing.max_over_ranks(ms)))
                best.append(min(zip(times, chunks, strict=True)))
            trials.append((best[0][0] + best[1][0], sms, best[0][1], best[1][1]))
        return min(trials)[1:]

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.buffer.destroy()


class Liger:
    """The NVSHMEM memory of liger-cute-kernels, which cannot grow.

    folder: where the package `liger_cute_kernels` lies, with apache-tvm-ffi and NVSHMEM.  groups: of equal size on all
    ranks, by name.  tokens: the most of a rank.  shapes: all that will come.
    """

    def __init__(
        self, folder: str, groups: Mapping[str, dist.ProcessGroup], device: torch.device, tokens: int,
        shapes: Sequence[Shape],
    ) -> None:  # fmt: skip
        sys.path.insert(0, folder)
        import liger_cute_kernels
        from liger_cute_kernels import nvshmem, tvm_ffi

        self.ffi, self.nvshmem = tvm_ffi, nvshmem
        of_all = (max(getattr(s, name) for s in shapes) for name in ("hidden", "num_experts", "top_k"))
        most = tokens, *of_all
        for name, group in groups.items():
            size = dist.get_world_size(group)
            room = liger_cute_kernels.MoEConfig(*most, num_hosts=1, gpus_per_host=size, group=name)
            liger_cute_kernels.configure(process_groups={name: group}, device=device, moe=room)

    def team(self, group: dist.ProcessGroup) -> int:
        """Its number for a group."""
        return self.nvshmem.resolve_team(group, create=False)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.nvshmem.finalize()
