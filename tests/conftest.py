"""What holds for every test: no network, fixed seeds, and NaN wherever memory was never written."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what determinism on CUDA asks for

from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("linearize", deadline=None, derandomize=True)
settings.load_profile("linearize")

# Small tensors gain nothing from threads, and threads of several workers wait for each other.
torch.set_num_threads(1)


# In deterministic mode torch can fill uninitialised memory: with NaN, for floating point.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test starts from the same seed, whichever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of development data beside the repository; it is no part of it."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the development data in ../shared/data, which is absent")
    return folder
