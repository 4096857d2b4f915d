"""Stored tensors must be those a structure has, by name and shape."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from linearize.errors import CheckpointError

__all__ = ["check_tensors"]


def check_tensors(
    wanted: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
    *,
    source: str,
    remedy: str,
    label: str = "",
) -> None:
    """Refuse stored tensors that are missing, unexpected or of another shape.

    Args:
        wanted: what the structure has. stored: what was read from ``source``.
        label: put before a tensor's name in the error. remedy: what to do then.

    Raises:
        CheckpointError: for the first of them by name.
    """
    for name in sorted(wanted.keys() | stored.keys()):
        there, own = stored.get(name), wanted.get(name)
        if there is None or own is None or there.shape != own.shape:
            asked = "no such tensor" if own is None else f"shape {tuple(own.shape)}"
            found = "missing" if there is None else f"of shape {tuple(there.shape)}"
            raise CheckpointError(f"{label}{name} with {asked}", f"it {found} in {source}", remedy)
