"""What ranks with copies of the same experts tell each other before they sum gradients.

They are in different EP groups, so the others do not know what has ended a backward of one group, and would wait for it
in the sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from uniep.backends.protocol import decoded, error_index, error_of, utf8
from uniep.errors import PeerTimeoutError, UniEPError
from uniep.layout import TEXT_BYTES
from uniep.meeting import Meeting, Notices
from uniep.waiting import finish


class Copies:
    """The ranks of `group`, which hold copies of the same experts.

    sums: that this rank has begun.

    On GPUs the host does not wait for sums, so nothing is told there: a sum to which a copy does not come ends by the
    timeout of the group.
    """

    def __init__(self, group: dist.ProcessGroup, meeting: Meeting, device: torch.device) -> None:
        """meeting: of the group; it has exchanged something."""
        self._group: dist.ProcessGroup | None = group if device.type == "cpu" else None
        self._rank, self._timeout_s = meeting.rank, meeting.timeout_s
        self._notices = Notices(meeting, who="copy", what="sum", remedy="")
        self.sums = self._done = 0

    def agree(self, wanted: Mapping[str, bool], digest: Callable[[], int]) -> None:
        """Return once all are in this backward.  wanted: the parameters that need gradients.  digest: of the experts,
        the same for the same values.

        Raises another copy's error; UniEPError if copies want different gradients, or those of different experts;
        PeerTimeoutError if one does not come.
        """
        bits = sum(1 << bit for bit, want in enumerate(wanted.values()) if want)
        everyone = self._exchange(0, bits, digest() if self._group is not None else 0)
        for copy, (kind, _, _, text) in enumerate(everyone):
            if kind:
                self.done()
                raise error_of(kind - 1)(f"copy {copy} of the experts: {text}")
        if len({bits for _, bits, _, _ in everyone}) > 1:
            self.done()
            listed = (
                f"copy {copy}: {', '.join(n for bit, n in enumerate(wanted) if bits >> bit & 1) or 'none'}"
                for copy, (_, bits, _, _) in enumerate(everyone)
            )
            raise UniEPError(
                f"copies of the same experts want gradients of different parameters ({'; '.join(listed)}); call "
                "requires_grad_ alike on all copies"
            )
        if len({number for _, _, number, _ in everyone}) > 1:
            self.done()
            listed = (f"copy {copy}: {number & 2**64 - 1:#x}" for copy, (_, _, number, _) in enumerate(everyone))
            raise UniEPError(
                f"copies of the same experts have other weights than each other in sum {self.sums} (digests: "
                f"{', '.join(listed)}). They are in different layers, so all copies must run their backwards in the "
                "same order; or they were not initialised or loaded alike: give all copies the same seed or state"
            )

    def tell(self, error: UniEPError) -> bool:
        """Tell the others why this rank has no gradients for this sum; they raise it.  False: they cannot be told."""
        with contextlib.suppress(PeerTimeoutError):
            self._exchange(1 + error_index(error), text=str(error))
            self.done()
        return self._group is not None

    def wait(self, start: Callable[[], Any]) -> None:
        """Run a collective of the sum, which `start` begins.  Raises PeerTimeoutError."""
        try:
            finish(start(), self._timeout_s, lambda: self._notices.look(self.sums))
        except (RuntimeError, TimeoutError, PeerTimeoutError) as cause:
            raise PeerTimeoutError(
                f"copy {self._rank}, sum {self.sums} of expert gradients over copies: another copy did not come "
                f"within {self._timeout_s:g} s or is gone ({cause}). All copies must make the same backwards"
            ) from cause

    def done(self) -> None:
        """This rank has all of the sum."""
        self._done = self.sums

    def leave(self, cause: str) -> None:
        """Tell the others that this rank comes to no more sums."""
        self._group = None
        self._notices.tell(self._done, cause, failed=False)

    def forget(self) -> None:
        """In a forked child, where the group is the parent's."""
        self._group = None
        self._notices.forget()

    def _exchange(self, kind: int, bits: int = 0, number: int = 0, text: str = "") -> list[tuple[int, int, int, str]]:
        """Every copy's kind of error, bits, number and text; nobody's once it has left."""
        self.sums += 1
        if self._group is None:
            return []
        found = [t.tolist() for t in self._gather(torch.tensor([kind, bits, number], device="cpu"))]
        if not any(kind for kind, _, _ in found):
            return [(*numbers, "") for numbers in found]
        letters = [*utf8(text).ljust(TEXT_BYTES, b"\0")]
        texts = self._gather(torch.tensor(letters, dtype=torch.uint8, device="cpu"))
        return [(*numbers, decoded(t).rstrip("\0")) for numbers, t in zip(found, texts, strict=True)]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        group = self._group
        assert group is not None
        every = [torch.empty_like(mine) for _ in range(group.size())]
        self.wait(lambda: dist.all_gather(every, mine, group=group, async_op=True))
        return every
