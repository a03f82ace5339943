"""All ranks on one GPU, where there is no second one.  The package refuses that; here it serves checks of bits and
errors.

Ranks are processes, so that the GPU gives each a time slice in turn, also while the kernels of another one spin.  They
map each other's memory by CUDA IPC, and their collectives are gloo's.  What such a run says of speed is nothing.
"""

import torch
from torch.multiprocessing.reductions import reduce_tensor

from uniep.backends.hopper import link
from uniep.memory import check_room

NEEDS_OWN_GPU = {
    "copy_then_flag": "a time slice for each of 100,000 answers",
    "free_sms": "time, NCCL",
    "own_operators": "copies in a capture, which `send_first` cannot wait for",
    "plan_time": "time",
}


class SharedArena(link.Arena):
    """`Arena` whose memories all lie on this GPU."""

    def _allocate(self, size, member):
        if member.ep_size == 1:
            return super()._allocate(size, member)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(member.device)
        frees = member.meeting.exchange(free // member.ep_size, "room")
        check_room(self._describe(), size, frees)
        memory = torch.zeros(size, dtype=torch.uint8, device=member.device)
        torch.cuda.synchronize()
        handles = member.meeting.exchange([reduce_tensor(memory) for _ in range(member.ep_size)], "memory allocated")
        made = [memory if rank == member.rank else build(*args) for rank, (build, args) in enumerate(
            of_rank[member.rank] for of_rank in handles
        )]  # fmt: skip
        member.meeting.exchange(None, "memory mapped")
        return made


def send_first(self, x_TD, first=1, last=None, send=link.Link.send):
    """Copies inside one GPU take multiprocessors, all of which kernels that spin may hold: this rank's end first."""
    send(self, x_TD, first, last)
    self.copies.synchronize()


def install() -> None:
    link.Arena, link.Link.send = SharedArena, send_first
