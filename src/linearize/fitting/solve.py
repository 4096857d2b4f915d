"""Batched Levenberg-Marquardt on the moments: every head and every start at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linearize.fitting.moments import Moments, pair_indices

__all__ = ["embed_global", "evaluate", "fit_factor", "taylor_factor"]

ITERATIONS = 80


def taylor_factor(groups: int) -> Tensor:
    """The factor of ``1 + s + s²/2`` for any grouping, ``[G+1, G+1]``."""
    return embed_global(torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64), groups)


def embed_global(factor: Tensor, groups: int) -> Tensor:
    """A learned-global factor ``[..., 2, 2]`` as the factor of the same kernel with G groups.

    Every group takes the global row, so ``M_0g = m_01`` and ``M_gh = m_11`` (appendix D).
    """
    embedded = factor.new_zeros(*factor.shape[:-2], groups + 1, groups + 1)
    embedded[..., 0, :2] = factor[..., 0, :]
    embedded[..., 1:, :2] = factor[..., 1:, :]
    return embedded


def evaluate(moments: Moments, factor: Tensor, eps: float) -> Tensor:
    """Mean output error of ``factor [H, S, G+1, G+1]`` on the moments -> ``[H, S]``."""
    coefficients, _ = _coefficients(factor, eps)
    return _loss(moments, coefficients)[0]


def fit_factor(
    fit: Moments,
    validation: Moments,
    starts: Sequence[Tensor],
    eps: float,
    iterations: int = ITERATIONS,
) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """Fit L from several starts and keep, per head, the iterate that validates best.

    Args:
        fit, validation: statistics of H heads with G groups each.
        starts: factors ``[H, G+1, G+1]``.
        eps: the kernel's floor, added to ``M_00``.
        iterations: Levenberg-Marquardt steps.

    Returns:
        the best factor ``[H, G+1, G+1]`` (fp64), its fitting error ``[H]``, the index of its start
        ``[H]`` and the curve of the mean fitting error of the best start.
    """
    factor = torch.stack(list(starts), 1).double().tril()
    size = factor.shape[-1]
    rows, columns = pair_indices(size - 1)
    identity = torch.eye(len(rows), dtype=torch.float64)
    damping = torch.full(factor.shape[:2], 1e-3, dtype=torch.float64)
    coefficients, jacobian = _coefficients(factor, eps)
    loss, gradient, hessian = _loss(fit, coefficients, derivatives=True)
    best, best_validation, best_fit = factor, _loss(validation, coefficients)[0], loss
    curve = [float(loss.amin(1).mean())]
    for _ in range(iterations):
        slope = (gradient[..., None, :] @ jacobian)[..., 0, :]
        curvature = jacobian.transpose(-1, -2) @ hessian @ jacobian
        scale = curvature.diagonal(dim1=-2, dim2=-1)
        floor = scale.amax(-1, keepdim=True) * 1e-9 + 1e-30
        system = curvature + torch.diag_embed(damping[..., None] * (scale + floor) + floor)
        step = torch.linalg.solve(system + identity * 1e-30, -slope)
        trial = factor.clone()
        trial[..., rows, columns] += step
        coefficients, trial_jacobian = _coefficients(trial, eps)
        trial_loss, trial_gradient, trial_hessian = _loss(fit, coefficients, derivatives=True)
        better = (trial_loss < loss) & trial_loss.isfinite()
        checked = _loss(validation, coefficients)[0]
        wins = better & (checked < best_validation)
        best = torch.where(wins[..., None, None], trial, best)
        best_validation = torch.where(wins, checked, best_validation)
        best_fit = torch.where(wins, trial_loss, best_fit)
        damping = torch.where(better, damping / 4, damping * 6).clamp(1e-12, 1e12)
        done = not bool((better & (loss - trial_loss > 1e-9 * loss)).any() or (damping < 1e6).any())
        factor = torch.where(better[..., None, None], trial, factor)
        jacobian = torch.where(better[..., None, None], trial_jacobian, jacobian)
        hessian = torch.where(better[..., None, None], trial_hessian, hessian)
        gradient = torch.where(better[..., None], trial_gradient, gradient)
        loss = torch.where(better, trial_loss, loss)
        curve.append(float(loss.amin(1).mean()))
        if done:
            break
    chosen = best_validation.argmin(1)
    heads = torch.arange(len(chosen))
    return best[heads, chosen], best_fit[heads, chosen], chosen, curve


def _coefficients(factor: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Coefficients ``m [..., P + 1]`` of the moments and their Jacobian in L, ``[..., P + 1, P]``."""
    groups = factor.shape[-1] - 1
    rows, columns = pair_indices(groups)
    multiplicity = torch.where(rows == columns, 1.0, 2.0).double()
    gram = factor @ factor.transpose(-1, -2)
    ones = torch.ones_like(factor[..., 0, :1])
    coefficients = torch.cat([gram[..., rows, columns] * multiplicity, ones], -1)
    coefficients[..., 0] += eps
    same_row = (rows[:, None] == rows).double()
    same_column = (columns[:, None] == rows).double()
    by_column = factor[..., columns[:, None], columns]
    by_row = factor[..., rows[:, None], columns]
    jacobian = multiplicity[:, None] * (same_row * by_column + same_column * by_row)
    return coefficients, torch.cat([jacobian, torch.zeros_like(jacobian[..., :1, :])], -2)


def _loss(moments: Moments, m: Tensor, derivatives: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Loss ``[H, S]``, gradient ``[H, S, P+1]`` and Gauss-Newton matrix ``[H, S, P+1, P+1]`` in m."""
    gram, mass = moments.gram, moments.mass
    heads, count, width = mass.shape
    denominator = (m @ mass.transpose(-1, -2)).clamp(min=1e-300)  # [H, S, n]
    image = (m @ gram.reshape(heads, count * width, width).transpose(-1, -2)).unflatten(
        -1, (count, width)
    )
    image = image / denominator[..., None]  # A m / den
    error = (image @ m[..., None])[..., 0] / denominator  # [H, S, n]
    loss = error.mean(-1)
    if not derivatives:
        return loss, loss, loss
    inverse = 1 / denominator
    weighted = image - error[..., None] * mass[:, None]
    gradient = 2 * (inverse[..., None, :] @ weighted)[..., 0, :] / count
    scaled = mass[:, None] * inverse[..., None]
    pulled = image * inverse[..., None]
    cross = pulled.transpose(-1, -2) @ scaled
    outer = (scaled * error[..., None]).transpose(-1, -2) @ scaled
    base = (inverse.square() @ gram.reshape(heads, count, width * width)).unflatten(
        -1, (width, width)
    )
    hessian = 2 * (base - cross - cross.transpose(-1, -2) + outer) / count
    return loss, gradient, hessian
