"""One process or many: what a stage needs to know when `accelerate launch` started several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Processes"]

Item = TypeVar("Item")


@dataclass(frozen=True)
class Processes:
    """This process among its peers; a single process is the case ``count == 1``.

    Attributes:
        rank: number of this process, from 0; number 0 writes files and shows progress.
        count: how many there are.
    """

    rank: int = 0
    count: int = 1

    @staticmethod
    def join() -> Processes:
        """The processes of the launcher that set ``WORLD_SIZE``, connected; or this one alone."""
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            return Processes()
        from accelerate import PartialState

        state: Any = PartialState()
        return Processes(state.process_index, state.num_processes)

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Every ``count``-th item, starting with number ``rank``."""
        return list(items[self.rank :: self.count])

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over all processes, in one exchange."""
        if self.count == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten().float() for tensor in tensors])
        torch.distributed.all_reduce(flat)
        start = 0
        for tensor in tensors:
            part = flat[start : start + tensor.numel()]
            tensor.copy_(part.view_as(tensor))
            start += tensor.numel()

    def gather(self, shares: list[Item]) -> list[Item]:
        """The items of all processes in the order that :meth:`share` took them from."""
        if self.count == 1:
            return shares
        everyone: list[list[Item]] = [[] for _ in range(self.count)]
        torch.distributed.all_gather_object(everyone, shares)
        longest = max(len(one) for one in everyone)
        return [one[at] for at in range(longest) for one in everyone if at < len(one)]

    def wait(self) -> None:
        """Go on when all processes have come this far."""
        if self.count > 1:
            torch.distributed.barrier()
