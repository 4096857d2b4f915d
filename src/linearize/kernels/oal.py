"""OAL: the grouped positive quadratic kernel of outlier-aware attention linearization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linearize.fitting import Calibration, FitResult, Moments, fit_factor, match_outputs
from linearize.fitting.solve import embed_global, evaluate, refine_on_parts, taylor_factor
from linearize.grouping import bootstrap_groups, contributions, fixed_groups
from linearize.kernels.base import HeadShape, Kernel
from linearize.ops.features import Features, KernelMap, Weights
from linearize.ops.projected import ProjectedQuadratic
from linearize.ops.quadratic import GroupedQuadratic, feature_count

__all__ = ["OAL"]

PERTURBATION = 0.1


class OAL(Kernel):
    """``ε + ‖Lᵀ [1, s_1, …, s_G]‖²`` with dimensions grouped by contribution (OAL paper, section 4).

    Args:
        shape: head geometry.
        groups: size of the largest head's grouping; heads with fewer groups are zero-padded.
        eps: the positive floor ε.
        seed: seed of grouping and starts.
    """

    name = "oal"
    title = "OAL"
    source = "Outlier-Aware Attention Linearization, sections 4.1-4.3"
    projects = True

    def __init__(
        self, shape: HeadShape, *, groups: int = 2, eps: float = 1e-6, seed: int = 0
    ) -> None:
        super().__init__(shape, seed=seed)
        self.eps = eps
        self.groups: Tensor
        start = torch.arange(shape.head_dim, device="cpu") - (shape.head_dim - groups)
        start = start.clamp(min=0).expand(shape.query_heads, -1).clone()
        self.register_buffer("groups", start)  # a placeholder until `fit` or a checkpoint fills it
        factor = taylor_factor(groups).float().expand(shape.query_heads, -1, -1)
        self.factor = nn.Parameter(factor.clone())
        self._known: dict[type, tuple[tuple[Tensor, ...], KernelMap]] = {}

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "groups": self.factor.shape[-1] - 1, "eps": self.eps}

    @property
    def feature_count(self) -> int:
        return feature_count(self.shape.head_dim)

    @property
    def group_counts(self) -> list[int]:
        """Number of groups of every query head."""
        return [int(count) + 1 for count in self.groups.amax(1)]

    @property
    def trainable_numbers(self) -> int:
        """``Σ (G+1)(G+2)/2`` over the heads, without the zero padding."""
        return sum((count + 1) * (count + 2) // 2 for count in self.group_counts)

    def map(self) -> KernelMap:
        return self._map(GroupedQuadratic, self.groups, self.factor)

    def projected(self, directions: Tensor) -> KernelMap:
        return self._map(ProjectedQuadratic, self.groups, self.factor, directions)

    def _map(
        self, form: type[GroupedQuadratic] | type[ProjectedQuadratic], *numbers: Tensor
    ) -> KernelMap:
        """Coefficients for the current numbers; kept between calls while nothing is trained."""
        settings = dict(eps=self.eps, scale=self.shape.scale, dtype=self.dtype)
        if torch.is_grad_enabled():
            return form(*numbers, **settings)  # type: ignore[arg-type]
        known = self._known.get(form)
        if known is None or known[1].dtype != self.dtype or not _equal(known[0], numbers):
            kept = tuple(number.detach().clone() for number in numbers)
            known = self._known[form] = kept, form(*numbers, **settings)  # type: ignore[arg-type]
        return known[1]

    def query_features(self, q: Tensor) -> Features:
        return self.map().query_features(q)

    def key_features(self, k: Tensor) -> Features:
        return self.map().key_features(k)

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        return self.map().weights(q, k)

    def find_groups(self, calibration: Calibration) -> Tensor:
        """Groups ``[Hq, d]`` from the calibration prompts (appendix B)."""
        plan = calibration.plan
        prompts = calibration.kernel_prompts
        profile = contributions(prompts.q, prompts.k, calibration.scale)
        if plan.groups is not None:
            return fixed_groups(profile.mean(0), plan.groups)
        return bootstrap_groups(
            profile,
            alpha=plan.alpha,
            gamma=plan.gamma,
            tau=plan.tau,
            min_groups=plan.min_groups,
            bootstrap=plan.bootstrap,
            generator=calibration.generator(3),
        )

    def assign(self, groups: Tensor, factor: Tensor) -> None:
        """Take over groups ``[Hq, d]`` and factors ``[Hq, G+1, G+1]`` of any size."""
        self.groups = groups.to(self.groups.device, torch.long)
        self.factor = nn.Parameter(factor.to(self.factor.device, torch.float32).contiguous())

    def fit(self, calibration: Calibration) -> FitResult:
        """Find the groups, then match outputs with the plan's solver from three starts (appendix C)."""
        groups = self.find_groups(calibration)
        if calibration.plan.solver == "adam":
            return self._fit_by_adam(calibration, groups)
        return self._fit_by_moments(calibration, groups)

    def _fit_by_moments(self, calibration: Calibration, groups: Tensor) -> FitResult:
        heads_by_count: dict[int, list[int]] = {}
        for head, largest in enumerate(groups.amax(1).tolist()):
            heads_by_count.setdefault(largest + 1, []).append(head)
        size = max(heads_by_count) + 1
        factor = torch.zeros(groups.shape[0], size, size, dtype=torch.float64)
        fit_mse = [0.0] * len(groups)
        names = [""] * len(groups)
        curves = []
        for count, heads in sorted(heads_by_count.items()):
            fit = _collect(calibration, groups, heads, validation=False)
            validation = _collect(calibration, groups, heads, validation=True)
            if count == 1:
                starts = {"taylor": taylor_factor(1).expand(len(heads), -1, -1)}
            else:
                starts = self._starts(
                    _learned_global(fit, validation, self.eps), count, calibration
                )
            found, _, chosen, curve = fit_factor(fit, validation, list(starts.values()), self.eps)
            found = refine_on_parts(fit, validation, found, self.eps, len(calibration.fit))
            error = evaluate(fit, found[:, None], self.eps)[:, 0]
            factor[heads, : count + 1, : count + 1] = found
            for row, head in enumerate(heads):
                fit_mse[head] = float(error[row])
                names[head] = list(starts)[int(chosen[row])]
            curves.append(curve)
        self.assign(groups, factor)
        longest = max(len(curve) for curve in curves)
        padded = [curve + curve[-1:] * (longest - len(curve)) for curve in curves]
        weight = [len(heads) for _, heads in sorted(heads_by_count.items())]
        mean = [
            sum(w * c[i] for w, c in zip(weight, padded, strict=True)) / len(groups)
            for i in range(longest)
        ]
        return FitResult(fit_mse, names, mean)

    def _starts(
        self, learned_global: Tensor, count: int, calibration: Calibration
    ) -> dict[str, Tensor]:
        """The three starts of appendix C, ``[H, G+1, G+1]`` each."""
        embedded = embed_global(learned_global, count)
        noise = torch.randn(embedded.shape, generator=calibration.generator(4), dtype=torch.float64)
        size = embedded.abs().amax((-1, -2), keepdim=True)
        return {
            "global": embedded,
            "taylor": taylor_factor(count).expand(len(embedded), -1, -1),
            "perturbed": embedded + (PERTURBATION * size * noise).tril(),
        }

    def _fit_by_adam(self, calibration: Calibration, groups: Tensor) -> FitResult:
        """The paper's recipe: Adam from three starts, the best validation per head."""
        count = int(groups.max()) + 1
        heads = len(groups)
        taylor = taylor_factor(1).expand(heads, -1, -1)
        self.assign(torch.zeros_like(groups), taylor)
        result, best = match_outputs(self, calibration, start="taylor")
        if count == 1:
            return result
        starts = self._starts(self.factor.detach().double(), count, calibration)
        best = torch.full_like(best, torch.inf)
        kept = torch.zeros(heads, count + 1, count + 1)
        fit_mse, names, curve = [0.0] * heads, [""] * heads, []
        for name, start in starts.items():
            self.assign(groups, start)
            result, error = match_outputs(self, calibration, start=name)
            for head in torch.nonzero(error < best).flatten().tolist():
                kept[head] = self.factor.detach()[head]
                fit_mse[head], names[head] = result.fit_mse[head], name
            best = torch.minimum(best, error)
            curve += result.curve
        self.assign(groups, kept)
        return FitResult(fit_mse, names, curve)


def _learned_global(fit: Moments, validation: Moments, eps: float) -> Tensor:
    """The fitted G = 1 factor ``[H, 2, 2]`` from the moments of any grouping."""
    start = taylor_factor(1).expand(len(fit.mass), -1, -1)
    factor, _, _, _ = fit_factor(fit.pooled(), validation.pooled(), [start], eps)
    return factor


def _collect(
    calibration: Calibration, groups: Tensor, heads: list[int], *, validation: bool
) -> Moments:
    plan = calibration.plan
    return Moments.collect(
        calibration.validation if validation else calibration.fit,
        (calibration.kernel_validation if validation else calibration.kernel_fit).k,
        groups,
        heads,
        scale=calibration.scale,
        sinks=plan.sinks,
        window=plan.window,
        saturation=plan.saturation,
        positions=plan.positions * (4 if validation else 1),
        generator=calibration.generator(5 if validation else 6),
    )


def _equal(known: tuple[Tensor, ...], numbers: tuple[Tensor, ...]) -> bool:
    """By value: writes through ``.data`` leave no other trace."""
    pairs = list(zip(known, numbers, strict=True))
    return all(one.device == other.device and torch.equal(one, other) for one, other in pairs)
