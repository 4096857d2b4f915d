"""Several processes end with what one gives, and are all there when they were asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import adaptation
import linearize
import tiny
from linearize.errors import BackendError
from linearize.processes import Processes, _asked
from linearize.text import default_text


def test_alone_everything_is_its_own() -> None:
    alone = Processes.join()
    assert (alone.rank, alone.count, alone.main) == (0, 1, True)
    assert alone.share([1, 2, 3]) == alone.gather([1, 2, 3]) == [1, 2, 3]
    tensor = torch.ones(2)
    alone.add_up([tensor])
    alone.wait()
    alone.leave()
    assert torch.equal(tensor, torch.ones(2))


@pytest.mark.parametrize("count", [5, 2])
def test_exchanges_give_everyone_everything_in_order(count: int, tmp_path: Path) -> None:
    """Five items are shared unevenly by three processes; two leave one without."""
    for rank, (tensors, items, gathered, main) in enumerate(
        adaptation.many(adaptation.shared_sums, 3, tmp_path, count)
    ):
        assert torch.equal(tensors[0], torch.full((2, 3), 6.0))
        assert float(tensors[1]) == 111.0
        everything = [f"item {i}" for i in range(count)]
        assert items == everything[rank::3]
        assert gathered == everything
        assert main == (rank == 0)


def without_time(value: Any) -> str:
    """As text, exact to the last bit, without what depends on the clock."""
    if isinstance(value, dict):
        value = {k: without_time(v) for k, v in value.items() if "seconds" not in k}
    elif isinstance(value, list):
        value = [without_time(one) for one in value]
    return json.dumps(value)


@pytest.mark.parametrize(
    "changes",
    [{"kernel": "oal", "window": 2}, {"kernel": "performer"}, {"fitting": "sequential"}],
    ids=["oal", "performer", "sequential"],
)
def test_a_shared_conversion_is_bitwise_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    """Three layers, two processes."""
    report, tensors = adaptation.shared_conversion(changes)
    for found, kernels in adaptation.many(adaptation.shared_conversion, 2, tmp_path, changes):
        assert without_time(found) == without_time(report)
        assert kernels.keys() == tensors.keys()
        assert all(torch.equal(kernels[name], value) for name, value in tensors.items())


def test_a_shared_comparison_is_bitwise_the_same_also_resumed(tmp_path: Path) -> None:
    wanted = without_time(adaptation.shared_fidelity(None))
    store = tmp_path / "parts"
    for found in adaptation.many(adaptation.shared_fidelity, 2, tmp_path, store):
        assert without_time(found) == wanted
    parts = sorted(store.iterdir())
    assert len(parts) == 12  # three layers: two kernels once, one with two seeds
    for part in parts[::2]:
        part.unlink()
    for found in adaptation.many(adaptation.shared_fidelity, 2, tmp_path, store):
        assert without_time(found) == wanted


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["launch", "--num_processes", "2", "-m", "linearize", "adapt", "a"], 2),
        (["/usr/bin/accelerate-launch", "--cpu", "--num_processes=3", "train.py"], 3),
        (["launch", "-m", "linearize"], None),
        (["something", "else"], None),
    ],
)
def test_the_number_asked_for_is_read_off_the_launcher(words: list[str], count: int | None) -> None:
    running = "import time; print('here', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", running, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as launcher:
        try:
            assert launcher.stdout is not None
            launcher.stdout.readline()  # before that, its command line may not be its own yet
            if count is None:
                with pytest.raises(BackendError, match="--num_processes N"):
                    _asked(launcher.pid)
            else:
                assert _asked(launcher.pid) == count
        finally:
            launcher.kill()


@pytest.mark.slow
def test_accelerate_launch_starts_two_processes_on_cpus(tmp_path: Path) -> None:
    base, text = tmp_path / "base", tmp_path / "text.txt"
    tiny.model().save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    text.write_text(default_text()[:3000], encoding="utf-8")
    options = ["--text", text, "--steps", "4", "--block", "64", "--validation-blocks", "2"]
    environment = os.environ | {"PYTHONPATH": str(Path(linearize.__file__).parents[1])}

    def curves(out: str, accumulate: int, *launcher: str) -> Any:
        command = [sys.executable, *launcher, "-m", "linearize", "adapt", base, *options]
        command += ["--accumulate", str(accumulate), "--out", tmp_path / out]
        subprocess.run(command, check=True, env=environment, timeout=300)
        return json.loads((tmp_path / out / "adaptation.json").read_text())

    accelerate = ("-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2")
    two, one = curves("two", 1, *accelerate), curves("one", 2)
    assert (two["processes"], one["processes"]) == (2, 1)
    for name in ("loss", "lr", "gradient_norm", "nll"):
        assert two["curves"][name] == pytest.approx(one["curves"][name], rel=1e-4)
