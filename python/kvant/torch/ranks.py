"""Messages between the ranks of torch.distributed: counted, and errors in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..errors import Error, invalid, make_error

T = TypeVar("T")


class SentBytes(NamedTuple):
    """What a rank has sent, in bytes. What goes to all other ranks counts once for each.

    ``headers`` are shapes, by which ranks see that they agree; ``parts`` outputs and statistics of
    attention; ``chunks`` keys and values, as they are stored.
    """

    headers: int = 0
    parts: int = 0
    chunks: int = 0


class Ranks:
    """The processes of a group. All of them call the same methods in the same order."""

    def __init__(self, group: Any, timeout: Any) -> None:
        """``timeout``: of messages between hosts where the group's backend is not gloo."""
        if not dist.is_available() or not dist.is_initialized():
            raise invalid("torch.distributed is not initialised: torch.distributed.init_process_group comes "
                          "first, in programs that torchrun starts")
        self.group = dist.group.WORLD if group is None else group
        member = self.group is not dist.GroupMember.NON_GROUP_MEMBER
        self.rank = dist.get_rank(self.group) if member else -1
        if self.rank < 0:
            raise invalid("this process is not in the group that the cache is spread over")
        self.count: int = dist.get_world_size(self.group)
        self.sent = SentBytes()
        # A host must not wait for its GPU to learn of a shape.
        self._hosts = self.group
        if "gloo" not in str(dist.get_backend(self.group)):
            members = dist.get_process_group_ranks(self.group)
            self._hosts = self._do("a group of hosts", lambda: dist.new_group(
                members, timeout=timeout, backend="gloo", use_local_synchronization=True))

    def gather_objects(self, what: str, own: T) -> list[T]:
        """Each rank's, by pickle: for what is asked once."""
        every: list[Any] = [None] * self.count
        self._do(what, lambda: dist.all_gather_object(every, own, self._hosts))
        return every

    def gather_headers(self, what: str, own: list[int]) -> list[list[int]]:
        """Each rank's numbers, of 64 bits and as many on each."""
        message = torch.tensor(own, dtype=torch.int64)
        every = [torch.empty_like(message) for _ in range(self.count)]
        self._do(what, lambda: dist.all_gather(every, message, self._hosts))
        self._count(headers=message.nbytes * (self.count - 1))
        return [each.tolist() for each in every]

    def gather(self, what: str, own: torch.Tensor) -> torch.Tensor:
        """[ranks, n] of each rank's [n]."""
        every = own.new_empty(self.count * own.numel())
        self._do(what, lambda: dist.all_gather_into_tensor(every, own, self.group))
        self._count(parts=own.nbytes * (self.count - 1))
        return every.view(self.count, -1)

    def pass_on(
        self, what: str, to_next: torch.Tensor | None, from_last: torch.Tensor | None
    ) -> Callable[[], None]:
        """Begins to send bytes to the next rank, and to receive such from the one before; waits when called."""
        operations = []
        for tensor, operation, rank in ((to_next, dist.isend, self.rank + 1),
                                        (from_last, dist.irecv, self.rank - 1)):
            if tensor is not None and tensor.numel() > 0:
                peer = dist.get_global_rank(self.group, rank)
                operations.append(dist.P2POp(operation, tensor, peer, self.group))
        if to_next is not None:
            self._count(chunks=to_next.nbytes)
        if not operations:
            return lambda: None
        works = self._do(what, lambda: dist.batch_isend_irecv(operations))
        return lambda: self._do(what, lambda: [work.wait() for work in works])

    def _count(self, **bytes: int) -> None:
        self.sent = SentBytes(*(a + b for a, b in zip(self.sent, SentBytes(**bytes))))

    def _do(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Error:
            raise
        except RuntimeError as error:
            raise make_error("internal", f"rank {self.rank} of {self.count}: {what} failed, as when a rank is "
                             f"gone: {error}") from error
