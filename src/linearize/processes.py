"""One process or many: what a stage needs to know when a launcher started several."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from linearize.errors import BackendError

__all__ = ["Processes", "complete_launch"]

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
        """The processes of the launcher that set ``WORLD_SIZE``, connected; or this one alone.

        A group that is there already, as accelerate's ``Accelerator`` makes one, is used.
        """
        if not torch.distributed.is_available():
            return Processes()
        if not torch.distributed.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
                return Processes()
            gpu = torch.cuda.is_available()
            if gpu:
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            torch.distributed.init_process_group("nccl" if gpu else "gloo")
        return Processes(torch.distributed.get_rank(), torch.distributed.get_world_size())

    @property
    def device(self) -> str:
        """Where this process computes: its own GPU if there is one, else the CPU."""
        if not torch.cuda.is_available():
            return "cpu"
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}"

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
        place = tensors[0].device
        flat = torch.cat([tensor.flatten().float().to(place) for tensor in tensors])
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

    def leave(self) -> None:
        """Wait for all processes and disconnect; the end of what :meth:`join` began."""
        self.wait()
        if self.count > 1:
            torch.distributed.destroy_process_group()


def complete_launch() -> None:
    """Start the processes that `accelerate launch --num_processes N` leaves out, instead of this one.

    It starts N processes on GPUs, but on CPUs only one unless it goes through MPI. The one it
    started then becomes torch's launcher for all N; nothing happens in any other case.

    Raises:
        BackendError: several processes were asked for, but not how many.
    """
    alone = {"MASTER_PORT", "ACCELERATE_USE_CPU"} <= os.environ.keys()
    if not alone or {"WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"} & os.environ.keys():
        return
    count = _asked(os.getppid())
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "linearize", *sys.argv[1:]])


def _asked(launcher: int) -> int:
    """The number of processes on the command line of `accelerate launch`."""
    import psutil
    from accelerate.commands.launch import launch_command_parser

    words = psutil.Process(launcher).cmdline()
    starts = [at for at, word in enumerate(words) if word.endswith(("launch", "launch.py"))]
    if starts:
        found, _ = launch_command_parser().parse_known_args(words[starts[0] + 1 :])
        if found.num_processes:
            return int(found.num_processes)
    raise BackendError(
        "several processes through accelerate launch",
        "one process, and no --num_processes on its command line",
        "Give --num_processes N, or use: torchrun --nproc_per_node N -m linearize …",
    )
