"""Adaptations of tiny models, in this process and in others: shared by the tests of `adapt`.

Other processes are forked from a server that has imported everything, so that starting one costs
nothing and killing one harms nothing.
"""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linearize
import tiny
from linearize import Adaptation, AdaptSettings, Loaded
from linearize.adapt.checkpoint import CheckpointFile
from linearize.lora import lora_tensors
from linearize.processes import Processes

SETTINGS: dict[str, Any] = {
    "steps": 6,
    "block": 32,
    "batch": 2,
    "lr": 0.02,
    "rank": 4,
    "dropout": 0.2,
    "eval_every": 2,
    "validation_blocks": 3,
    "checkpoint_seconds": 0,
}
KINDS = ("oal", "softmax")


def settings(**changes: Any) -> AdaptSettings:
    """A run of a second."""
    return AdaptSettings(**SETTINGS | changes)


def model(kind: str = "oal") -> Loaded:
    """A tiny Llama, converted with `kind` unless that is "softmax"."""
    return (
        tiny.loaded() if kind == "softmax" else tiny.filled(tiny.loaded(), tiny.plan(kernel=kind))
    )


def adapt(kind: str = "oal", options: dict[str, Any] | None = None, **changes: Any) -> Adaptation:
    """Adapt a fresh tiny model to the tiny text."""
    return linearize.adapt(model(kind), tiny.text(), settings(**changes), **options or {})


def trained(of: Loaded) -> dict[str, Tensor]:
    """Everything an adaptation may change, by name."""
    return {name: value.detach().clone() for name, value in lora_tensors(of.model).items()} | (
        tiny.kernel_tensors(of.model)
    )


def curves(adaptation: Adaptation) -> dict[str, list[float]]:
    """The curves that do not depend on the clock."""
    found = vars(adaptation.report.curves)
    return {name: found[name] for name in ("loss", "lr", "gradient_norm", "validated", "nll")}


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["linearize", "tiny", "adaptation", "peft"])
    return context


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Run a function of this module in another process."""
    process: BaseProcess = _server().Process(target=target, args=arguments)
    process.start()
    return process


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def many(work: Callable[..., Any], count: int, folder: Path, *arguments: Any) -> list[Any]:
    """What `work(*arguments)` returns in each process of a launcher's group of `count`."""
    port = free_port()
    processes = [
        start(_one_of_many, work, rank, count, port, folder, arguments) for rank in range(count)
    ]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * count
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _one_of_many(
    work: Callable[..., Any], rank: int, count: int, port: int, folder: Path, arguments: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.save(work(*arguments), folder / f"{rank}.pt")
    Processes.join().leave()


def shared_adaptation(changes: dict[str, Any]) -> Any:
    """Curves, trained tensors and the number of processes."""
    found = adapt(**changes)
    return curves(found), trained(found.loaded), found.report.processes


def shared_conversion(changes: dict[str, Any]) -> Any:
    """The report and the kernels of a conversion."""
    found = linearize.convert(tiny.loaded(), tiny.text(), tiny.plan(**changes))
    return found.report.as_dict(), tiny.kernel_tensors(found.loaded.model)


def shared_fidelity(store: Path | None) -> Any:
    """A comparison of three kernels on all layers."""
    plan = tiny.plan(skip_blocks=3, fit_blocks=2)
    names = ["oal", "performer", "based"]
    return linearize.evaluate.fidelity(
        tiny.loaded(), tiny.text(), "all", names, plan, seeds=[0, 1], store=store
    ).as_dict()


def shared_sums(count: int) -> Any:
    """What the exchanges of a group give, from numbers that tell the processes apart."""
    processes = Processes.join()
    rank = processes.rank
    tensors = [torch.full((2, 3), float(rank + 1)), torch.tensor(10.0**rank)]
    processes.add_up(tensors)
    items = processes.share([f"item {i}" for i in range(count)])
    processes.wait()
    return tensors, items, processes.gather(items), processes.main


def killed(folder: Path, moment: str, step: int, changes: dict[str, Any]) -> None:
    """Adapt, and be killed at a step: in its forward pass, or in the middle of a write."""
    torch.set_num_threads(1)
    ours = {"step": 0}

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "update":
        run = linearize.adapt.__globals__["_Run"]
        inner = run._batch

        def batch(self: Any, number: int) -> Tensor:
            if self.state.step == step:
                die()
            value: Tensor = inner(self, number)
            return value

        run._batch = batch
    else:
        replace, write = Path.replace, CheckpointFile.write

        def torn(path: Path, target: Path) -> Path:
            if ours["step"] == step:
                if moment == "write":  # half the bytes have reached the disk
                    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
                    die()
                result = replace(path, target)
                die()
                return result
            return replace(path, target)

        def remember(file: CheckpointFile, state: Any) -> None:
            ours["step"] = state.step
            write(file, state)

        Path.replace = torn  # type: ignore[method-assign,assignment]
        CheckpointFile.write = remember  # type: ignore[method-assign]
    adapt(options={"folder": folder}, **changes)
