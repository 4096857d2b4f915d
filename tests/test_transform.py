"""What the kernel sees of a key: centring, and the directions in which logits vary most."""

import pytest
import torch
from torch import Tensor

from linearize.fitting import Activations
from linearize.transform import KeyTransform, logit_directions


def activations(seed: int = 0) -> Activations:
    """Keys with a mean, correlated dimensions of very different size, and two wild first ones."""
    source = torch.Generator().manual_seed(seed)
    q = torch.randn(3, 6, 50, 8, generator=source) * torch.linspace(0.1, 3, 8)
    k = torch.randn(3, 2, 50, 8, generator=source) @ torch.randn(8, 8, generator=source) + 2.0
    k[:, :, :2] *= 30
    return Activations(q, k, torch.randn(3, 2, 50, 5, generator=source))


def logit_error(data: Activations, seen: Tensor, keys: Tensor) -> Tensor:
    """Mean square of ``q·(k − k')`` over all queries and keys of a KV head, ``[Hkv]``."""
    gone = (keys - seen).double().transpose(0, 1).flatten(1, 2)
    queries = data.q.double().transpose(0, 1).unflatten(0, (2, 3)).flatten(1, 3)
    return (queries @ gone.transpose(1, 2)).square().mean((1, 2))


def test_the_centre_is_the_mean_of_the_keys_a_kernel_meets() -> None:
    data = activations()
    transform = KeyTransform(2, 8, center=True, rank=None)
    transform.fit(data, sinks=2)
    torch.testing.assert_close(transform.center, data.k[:, :, 2:].mean((0, 2)))
    torch.testing.assert_close(transform(data.k)[:, :, 2:].mean((0, 2)), torch.zeros(2, 8))


def test_all_directions_leave_the_keys_as_they_are() -> None:
    data = activations()
    transform = KeyTransform(2, 8, center=False, rank=8)
    transform.fit(data, sinks=0)
    torch.testing.assert_close(transform(data.k), data.k, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_no_other_directions_lose_less_of_the_logits(rank: int) -> None:
    data = activations()
    transform = KeyTransform(2, 8, center=True, rank=rank)
    transform.fit(data, sinks=2)
    keys = data.k[:, :, 2:] - transform.center[:, None]
    best = logit_error(data, transform(data.k)[:, :, 2:], keys)
    source = torch.Generator().manual_seed(rank)
    leading = torch.linalg.svd(keys.transpose(0, 1).flatten(1, 2), full_matrices=False).Vh[:, :rank]
    others = [leading.transpose(1, 2)]  # the largest directions of the keys themselves
    others += [torch.linalg.qr(torch.randn(2, 8, rank, generator=source)).Q for _ in range(20)]
    for basis in others:
        assert bool((logit_error(data, keys @ basis @ basis.transpose(1, 2), keys) > best).all())
    for _ in range(20):  # nor do small changes of the ones chosen
        shifted = transform.up + 0.03 * torch.randn(2, 8, rank, generator=source)
        moved = transform.coordinates(data.k)[:, :, 2:] @ shifted.transpose(1, 2)
        assert bool((logit_error(data, moved, keys) > best).all())


def test_energies_are_the_mean_square_logits_and_add_up() -> None:
    data = activations()
    energy, *_ = logit_directions(data.q, data.k)
    nothing = torch.zeros_like(data.k)
    torch.testing.assert_close(energy.sum(-1), logit_error(data, nothing, data.k))
    transform = KeyTransform(2, 8, center=False, rank=3)
    transform.fit(data, sinks=0)
    lost = logit_error(data, transform(data.k), data.k)
    torch.testing.assert_close(energy[:, 3:].sum(-1), lost, rtol=1e-3, atol=1e-6)


def test_coordinates_are_what_the_kernel_stores() -> None:
    data = activations()
    transform = KeyTransform(2, 8, center=True, rank=4)
    transform.fit(data, sinks=0)
    coordinates = transform.coordinates(data.k)
    assert coordinates.shape == (3, 2, 50, 4)
    torch.testing.assert_close(coordinates @ transform.up.transpose(1, 2), transform(data.k))
