"""The learned global quadratic: OAL with a single group, the paper's controlled baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.fitting import Calibration
from linearize.kernels.base import HeadShape
from linearize.kernels.oal import OAL

__all__ = ["LearnedGlobal"]


class LearnedGlobal(OAL):
    """``a + b s + c s²`` with positive learned coefficients (OAL paper, appendix D)."""

    name = "global"
    title = "Learned global"
    source = "Outlier-Aware Attention Linearization, appendix D (G = 1)"

    def __init__(
        self, shape: HeadShape, *, groups: int = 1, eps: float = 1e-6, seed: int = 0
    ) -> None:
        super().__init__(shape, groups=groups, eps=eps, seed=seed)

    def find_groups(self, calibration: Calibration) -> Tensor:
        return torch.zeros_like(self.groups)
