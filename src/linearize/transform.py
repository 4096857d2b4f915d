"""What a kernel sees of a key: the key itself, less its mean, or its part in a few directions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linearize.fitting import Activations

__all__ = ["KeyTransform"]

FLOOR = 1e-6  # smallest share of the queries' mean square that a direction is whitened with


class KeyTransform(nn.Module):
    """``k' = U Dᵀ (k − μ)`` per KV head, each part optional.

    Softmax does not change when all keys are shifted, so the centre μ costs a kernel nothing and lets
    it spend its quadratic on what differs between keys. The r directions are those in which logits
    vary most: with the queries' second moment ``S``, ``E (q·(k − k'))² = E ‖S^½ (k − k')‖²`` is least
    when ``S^½ k'`` is the projection of ``S^½ k`` on the r leading eigenvectors of its own second moment.

    That is where they start; μ, D and U are then trained with the kernel.

    Args:
        kv_heads, dim: shape of the keys.
        center: whether there is a μ.
        rank: number of directions; ``None`` keeps all.

    Attributes:
        center: μ, ``[Hkv, d]``, or ``None``.
        down, up: D and U, ``[Hkv, d, r]``, or ``None``.
    """

    def __init__(self, kv_heads: int, dim: int, *, center: bool, rank: int | None) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(kv_heads, dim)) if center else None
        self.down: nn.Parameter | None = None
        self.up: nn.Parameter | None = None
        if rank is not None:
            first = torch.eye(dim)[:, :rank].expand(kv_heads, -1, -1)
            self.down, self.up = nn.Parameter(first.clone()), nn.Parameter(first.clone())

    @property
    def rank(self) -> int | None:
        """Number of directions; ``None``: all."""
        return None if self.down is None else self.down.shape[-1]

    @property
    def identity(self) -> bool:
        """Whether keys pass as they are."""
        return self.center is None and self.down is None

    def forward(self, k: Tensor) -> Tensor:
        """``k [B, Hkv, N, d]`` -> what the kernel sees, in all d dimensions."""
        if self.down is None or self.up is None:
            return self._centred(k)
        return self.coordinates(k) @ self.up.to(k.dtype).transpose(-1, -2)

    def coordinates(self, k: Tensor) -> Tensor:
        """``k [B, Hkv, N, d]`` -> what a kernel on r directions sees: ``[B, Hkv, N, r | d]``."""
        centred = self._centred(k)
        return centred if self.down is None else centred @ self.down.to(k.dtype)

    def _centred(self, k: Tensor) -> Tensor:
        return k if self.center is None else k - self.center.to(k.dtype)[:, None]

    @torch.no_grad()
    def fit(self, data: Activations, sinks: int) -> None:
        """Mean and directions from keys that a kernel will meet: all but the first ``sinks``."""
        keys = data.k[:, :, min(sinks, data.k.shape[2] - 1) :].double()
        if self.center is not None:
            self.center.data = keys.mean((0, 2)).to(self.center)
        if self.down is None or self.up is None:
            return
        _, vectors, root, inverse = logit_directions(data.q, self._centred(keys))
        leading = vectors[..., : self.down.shape[-1]]
        self.down.data = (root @ leading).to(self.down)
        self.up.data = (inverse @ leading).to(self.up)


def logit_directions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Directions of the keys by the logit variance they carry.

    Args:
        q: ``[B, Hq, N, d]``; k: ``[B, Hkv, M, d]``, centred or not.

    Returns:
        per KV head, in fp64: mean square of the logits along every direction ``[Hkv, d]``,
        descending; the directions in the whitened space ``[Hkv, d, d]``, as columns; ``S^½`` and
        ``S^-½``, ``[Hkv, d, d]``.
    """
    kv_heads = k.shape[1]
    queries = q.double().transpose(0, 1).reshape(kv_heads, -1, q.shape[-1])
    keys = k.double().transpose(0, 1).reshape(kv_heads, -1, k.shape[-1])
    size, basis = torch.linalg.eigh(queries.transpose(1, 2) @ queries / queries.shape[1])
    size = size.clamp(min=FLOOR * size.mean(-1, keepdim=True)).clamp(min=1e-300)
    root = (basis * size[:, None].sqrt()) @ basis.transpose(1, 2)
    inverse = (basis / size[:, None].sqrt()) @ basis.transpose(1, 2)
    seen = keys @ root
    energy, vectors = torch.linalg.eigh(seen.transpose(1, 2) @ seen / keys.shape[1])
    return energy.flip(-1).clamp(min=0), vectors.flip(-1), root, inverse
