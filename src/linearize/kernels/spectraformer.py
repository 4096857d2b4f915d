"""SpectraFormer: optimal positive random features with a learned FastFood projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linearize.fitting import Activations, Calibration, FitResult
from linearize.kernels.base import HeadShape, Kernel
from linearize.ops.features import Features, KernelMap, Weights
from linearize.ops.partial import fold_heads, unfold_heads

__all__ = ["SpectraFormer"]

OFFSET = 1e-4


class SpectraFormer(Kernel):
    """OPRF on a FastFood projection (OPRF-FastFoodL), one projection for the whole layer.

    ``x`` is a query or key times ``√scale``. With ``ω = S H G Π H B / √d``, ``A = (1 − 1/ρ)/8``,
    ``B = √(1 − 4A)``, ``C = −1``, ``D = (1 − 4A)^{d/4}``, a log-feature is

        ``l(x) = A ‖ω‖² + B ωᵀx + C ‖x‖²``  and a feature  ``D exp(l − max l) + 1e-4``,

    the maximum taken over the features of the token. Without maximum and offset the features are an
    unbiased estimate of ``exp(−‖x − y‖²/2)``, which is ``e^{xᵀy}`` up to factors of one token each.
    The maximum belongs to the definition and is not undone: for queries it cancels but for the
    offset, keys it reweighs (their weights lose what the maximum took), as in the released code.

    H is the Hadamard matrix of ±1; a head dimension that is no power of two is padded with zeros to
    the next one, P. There are P + 1 features (65 for 64): the released projection ends with a
    constant one, whose ``‖ω‖²`` is taken as the mean of the others so that A does not set it apart.

    ρ depends on φ, the mean of ``‖q + k‖²``, which the released code measures on the running
    sequence. That would look ahead and change with the batch, so φ is a stored number: measured on
    the calibration keys and queries by :meth:`fit` before training, ``2 d scale`` (independent
    N(0, 1) coordinates) until then.

    Features and sums are fp64; B, G, S are fp32, trained, and start from the FastFood distributions
    (±1, normal, chi with P degrees of freedom over ``‖G‖``).

    Args:
        shape: head geometry.
        released: follow the released code where it leaves the formula: ωᵀx sees x times ``√scale``
            once more, and ``‖ω‖²`` is one number for all features, which the maximum removes.
        seed: seed of B, G, S and the permutation.
    """

    name = "spectraformer"
    title = "SpectraFormer"
    source = "Spectraformer: A Unified Random Feature Framework for Transformer (OPRF-FastFoodL)"
    shared_state = True
    dtype = torch.float64
    head_wise = False

    def __init__(self, shape: HeadShape, *, released: bool = False, seed: int = 0) -> None:
        super().__init__(shape, seed=seed)
        self.released = released
        size = 1 << (shape.head_dim - 1).bit_length()
        generator = torch.Generator(device="cpu").manual_seed(seed)
        draw: dict[str, Any] = dict(generator=generator, device="cpu")
        normal = torch.randn(size, dtype=torch.float32, **draw)
        chi = torch.randn(size, size, dtype=torch.float32, **draw).norm(dim=1)
        sign = torch.randint(2, (size,), **draw).float() * 2 - 1
        self.sign = nn.Parameter(sign)  # B
        self.gauss = nn.Parameter(normal)  # G
        self.stretch = nn.Parameter(chi / normal.norm())  # S
        self.permutation: Tensor
        self.register_buffer("permutation", torch.randperm(size, **draw))  # Π
        self.energy: Tensor
        default = 2 * shape.head_dim * shape.scale
        self.register_buffer(
            "energy", torch.tensor(default, dtype=torch.float32, device="cpu")
        )  # φ

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "released": self.released}

    @property
    def feature_count(self) -> int:
        return self.sign.numel() + 1

    def map(self) -> KernelMap:
        """The same kernel with its projection written out as a matrix."""
        size, dtype = self.sign.numel(), self.dtype
        sign, gauss, stretch = (p.to(dtype) for p in (self.sign, self.gauss, self.stretch))
        hadamard = _hadamard(size, dtype, sign.device)
        inner = (hadamard * sign)[self.permutation]
        omega = stretch[:, None] * (hadamard @ (gauss[:, None] * inner)) * size**-0.5
        omega = omega[:, : self.shape.head_dim]
        square = omega.square().sum(1)
        if self.released:
            omega = omega * self.shape.scale**0.5
            square = (stretch * gauss * sign).square().sum().expand(size)
        a, factor = _optimal(self.energy.to(dtype), self.shape.head_dim)
        bias = a * torch.cat([square, square.mean()[None]])
        return _Map(omega, bias, (1 - 4 * a).sqrt(), factor, self.shape.scale, dtype)

    def query_features(self, q: Tensor) -> Features:
        return self.map().query_features(q)

    def key_features(self, k: Tensor) -> Features:
        return self.map().key_features(k)

    def measure(self, data: Activations) -> None:
        """Set φ to the mean of ``‖q + k‖² scale`` over all pairs of ``data`` and all query heads."""
        q, k = data.q.double(), self.repeat_keys(data.k.double())
        squares = q.square().sum(-1).mean() + k.square().sum(-1).mean()
        cross = (q.mean((0, 2)) * k.mean((0, 2))).sum(-1).mean()
        self.energy = ((squares + 2 * cross) * self.shape.scale).to(self.energy)

    def fit(self, calibration: Calibration) -> FitResult | None:
        """Measure φ on the fitting sequences, then match outputs."""
        self.measure(calibration.kernel_fit)
        return super().fit(calibration)


@dataclass
class _Map:
    """Features for fixed parameters: ``omega [P, d]``, ``bias = A ‖ω‖² [P + 1]``, scalars B and D."""

    omega: Tensor
    bias: Tensor
    slope: Tensor
    factor: Tensor
    scale: float
    dtype: torch.dtype
    shared_state: bool = True

    def log_features(self, x: Tensor) -> Tensor:
        """``A ‖ω‖² + B ωᵀx + C ‖x‖²``, ``[..., d]`` -> ``[..., P + 1]``."""
        x = x * self.scale**0.5
        projected = x @ self.omega.to(x.dtype).T
        projected = torch.cat([projected, torch.ones_like(x[..., :1])], dim=-1)
        norm = x.square().sum(-1, keepdim=True)
        return self.bias.to(x.dtype) + self.slope.to(x.dtype) * projected - norm

    def query_features(self, q: Tensor) -> Features:
        log = self.log_features(q)
        shifted = torch.exp(log - log.amax(-1, keepdim=True))
        return Features(self.factor.to(q.dtype) * shifted + OFFSET)

    def key_features(self, k: Tensor) -> Features:
        return self.query_features(k)

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        query, keys = self.query_features(q).values, self.key_features(k).values
        product = fold_heads(query, k.shape[1]) @ keys.transpose(-1, -2)
        return Weights(unfold_heads(product, q.shape[1]))


def _optimal(energy: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``A`` and ``D`` of the variance-optimal features for ``φ = energy`` (SPEC section 3)."""
    base = 2 * energy + dim
    rho = ((base.square() + 8 * dim * energy).sqrt() - base) / (4 * energy)
    a = (1 - 1 / rho) / 8
    return a, (1 - 4 * a) ** (dim / 4)


def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix of ±1 of a power of two."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix
