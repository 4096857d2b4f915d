"""Pieces that every kernel here is made of, for rows of queries or keys.

A row is a token of one of the ``r`` heads that share a state: row ``m`` is token ``m // r`` of head
``m % r``, so that one tile holds the same tokens of all heads. Features are packed products of the
vector ``x`` extended by a one, ``x_left · x_right`` for two index tables; index ``D`` means the one.
Sums over rows or features are matrix products; there are no other reductions.
"""

# Triton reads the arguments' types at launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["head_rows", "load_channels", "load_features", "load_vectors", "row_offsets"]


@triton.jit
def row_offsets(shared, rows, tokens, r):
    """Row numbers ``[BM]`` of KV head ``shared`` -> their places in ``[H, N]``."""
    return (shared * r + rows % r) * tokens + rows // r


@triton.jit
def load_vectors(x, places, valid, dim: tl.constexpr, width: tl.constexpr):
    """``[BM, width]`` in fp32, zero beyond ``dim`` and in rows that are not valid."""
    column = tl.arange(0, width)
    mask = valid[:, None] & (column < dim)[None, :]
    return tl.load(x + places[:, None] * dim + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_channels(w, places, valid, first, channels, width: tl.constexpr):
    """Columns ``first ... first + width`` of ``w [..., channels]`` in fp32, zero beyond the last."""
    column = first + tl.arange(0, width)
    mask = valid[:, None] & (column < channels)[None, :]
    pointers = w + places[:, None] * channels + column[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_features(x, places, valid, left, right, known, dim: tl.constexpr):
    """Both factors ``[BM, BF]`` of the features with indices ``left, right [BF]``."""
    row = x + places[:, None] * dim
    mask = valid[:, None] & known[None, :]
    a = tl.load(row + left[None, :], mask=mask & (left < dim)[None, :], other=1.0).to(tl.float32)
    b = tl.load(row + right[None, :], mask=mask & (right < dim)[None, :], other=1.0).to(tl.float32)
    return tl.where(mask, a, 0.0), tl.where(mask, b, 0.0)


@triton.jit
def head_rows(rows, valid, r, width: tl.constexpr):
    """``[width, BM]``: one where a row belongs to a head, to sum rows by head in a matrix product."""
    head = tl.arange(0, width)
    return tl.where((head[:, None] == (rows % r)[None, :]) & valid[None, :], 1.0, 0.0)
