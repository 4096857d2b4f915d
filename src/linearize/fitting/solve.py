"""Batched damped Newton steps on the moments: every head and every start at once.

The loss is a mean of ratios of quadratic forms in ``m(L)``, so gradient and Hessian in L are exact.
Directions of negative curvature are followed downhill (the eigenvalues' absolute values are used).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linearize.fitting.moments import Moments, pair_indices

__all__ = ["embed_global", "evaluate", "fit_factor", "refine_on_parts", "taylor_factor"]

ITERATIONS = 60
PART_ITERATIONS = 8
NUDGE = 1e-3  # relative noise on every start: an embedded start is a saddle


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
        iterations: Newton steps.

    Returns:
        the best factor ``[H, G+1, G+1]`` (fp64), its fitting error ``[H]``, the index of its start
        ``[H]`` and the curve of the mean fitting error of the best start.
    """
    factor = torch.stack(list(starts), 1).double().tril()
    noise = torch.randn(
        factor.shape, generator=torch.Generator().manual_seed(0), dtype=factor.dtype
    )
    factor = (factor + NUDGE * factor.abs().amax((-1, -2), keepdim=True) * noise).tril()
    rows, columns = pair_indices(factor.shape[-1] - 1)
    damping = torch.full(factor.shape[:2], 1e-3, dtype=torch.float64)
    loss, gradient, hessian = _derivatives(fit, factor, eps)
    best, best_validation, best_fit = factor, evaluate(validation, factor, eps), loss
    curve = [float(loss.amin(1).mean())]
    for _ in range(iterations):
        values, vectors = torch.linalg.eigh(hessian)
        size = values.abs()
        size = size + (damping[..., None] + 1e-14) * size.amax(-1, keepdim=True) + 1e-300
        step = -(vectors @ ((gradient[..., None, :] @ vectors)[..., 0, :] / size)[..., None])
        trial = factor.clone()
        trial[..., rows, columns] += step[..., 0]
        trial_loss, trial_gradient, trial_hessian = _derivatives(fit, trial, eps)
        better = (trial_loss < loss) & trial_hessian.isfinite().all(-1).all(-1)
        checked = evaluate(validation, trial, eps)
        wins = better & (checked < best_validation)
        best = torch.where(wins[..., None, None], trial, best)
        best_validation = torch.where(wins, checked, best_validation)
        best_fit = torch.where(wins, trial_loss, best_fit)
        damping = torch.where(better, damping / 10, damping * 8).clamp(1e-12, 1e6)
        moving = (better & (loss - trial_loss > 1e-8 * loss)) | (~better & (damping < 1e4))
        factor = torch.where(better[..., None, None], trial, factor)
        hessian = torch.where(better[..., None, None], trial_hessian, hessian)
        gradient = torch.where(better[..., None], trial_gradient, gradient)
        loss = torch.where(better, trial_loss, loss)
        curve.append(float(loss.amin(1).mean()))
        if not bool(moving.any()):
            break
    chosen = best_validation.argmin(1)
    heads = torch.arange(len(chosen))
    return best[heads, chosen], best_fit[heads, chosen], chosen, curve


def refine_on_parts(
    fit: Moments, validation: Moments, factor: Tensor, eps: float, sequences: int
) -> Tensor:
    """Refit on parts of the fitting data and keep, per head, what validates best.

    The full-batch optimum is one sample of what the fitting sequences can say. Candidates are the
    optima without each one sequence and of each one sequence alone, reached from ``factor``
    ``[H, G+1, G+1]`` in a few steps; validation decides, as it does between checkpoints.
    """
    best, error = factor, evaluate(validation, factor[:, None], eps)[:, 0]
    if sequences < 2:
        return best
    parts = torch.arange(sequences).repeat_interleave(fit.mass.shape[1] // sequences)
    for sequence in range(sequences):
        for kept in (parts != sequence, parts == sequence):
            part = Moments(fit.gram[:, kept], fit.mass[:, kept], fit.groups)
            found, _, _, _ = fit_factor(part, validation, [factor], eps, PART_ITERATIONS)
            now = evaluate(validation, found[:, None], eps)[:, 0]
            best = torch.where((now < error)[:, None, None], found, best)
            error = torch.minimum(error, now)
    return best


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


def _derivatives(moments: Moments, factor: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss ``[H, S]``, gradient ``[H, S, P]`` and Hessian ``[H, S, P, P]`` in the entries of L."""
    rows, columns = pair_indices(factor.shape[-1] - 1)
    m, jacobian = _coefficients(factor, eps)
    loss, slope, curvature = _loss(moments, m, derivatives=True)
    gradient = (slope[..., None, :] @ jacobian)[..., 0, :]
    hessian = jacobian.transpose(-1, -2) @ curvature @ jacobian
    # m is itself quadratic in L: entries of one column interact through the slope of their pair
    pairs = torch.zeros_like(factor)
    pairs[..., rows, columns] = pairs[..., columns, rows] = 2 * slope[..., :-1]
    same_column = (columns[:, None] == columns).double()
    return loss, gradient, hessian + pairs[..., rows[:, None], rows] * same_column


def _loss(moments: Moments, m: Tensor, derivatives: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Loss ``[H, S]``, gradient ``[H, S, P+1]`` and Hessian ``[H, S, P+1, P+1]`` in m."""
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
    gradient = (inverse[..., None, :] @ (image - error[..., None] * mass[:, None]))[..., 0, :]
    scaled = mass[:, None] * inverse[..., None]
    cross = (image * inverse[..., None]).transpose(-1, -2) @ scaled
    outer = (scaled * error[..., None]).transpose(-1, -2) @ scaled
    base = (inverse.square() @ gram.reshape(heads, count, width * width)).unflatten(
        -1, (width, width)
    )
    hessian = base - 2 * (cross + cross.transpose(-1, -2)) + 3 * outer
    return loss, 2 * gradient / count, 2 * hessian / count
