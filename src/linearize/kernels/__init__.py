"""Every kernel of the library; see :mod:`linearize.kernels.base` for the contract."""

from linearize.kernels.base import HeadShape, Kernel, available, get

__all__ = ["HeadShape", "Kernel", "available", "get"]
