"""The decoding kernel: one token is read and added in one pass over the state."""

# Triton reads the arguments' types at launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from linearize.ops.triton.tiles import load_channels, load_features, load_vectors

__all__ = ["decode_kernel"]


@triton.jit
def decode_kernel(
    q,
    k,
    u,
    before,
    coefficients,
    slope,
    offset,
    counts,
    left,
    right,
    after,
    y,
    r,
    channels,
    features,
    components,
    eps,
    dim: tl.constexpr,
    wide: tl.constexpr,
    heads: tl.constexpr,
    block_features: tl.constexpr,
    width: tl.constexpr,
    tail: tl.constexpr,
    precision: tl.constexpr,
):
    """``y`` of one token from the state before it and the token itself; the state after it.

    Grid: feature blocks, states. ``q [H, dim]``, ``k [s, dim]``, ``u [s, channels]``,
    ``before, after [s, F, channels]``. Every block writes its share ``y [blocks, H, channels]``; the
    first adds the weight of the token's own key, which comes from the definition.
    """
    block = tl.program_id(0)
    state = tl.program_id(1).to(tl.int64)
    f = block * block_features + tl.arange(0, block_features)
    known = f < features
    at_left = tl.load(left + f, mask=known, other=0)
    at_right = tl.load(right + f, mask=known, other=0)
    head = tl.arange(0, heads)
    valid = head < r
    places = state * r + head
    a, b = load_features(q, places, valid, at_left, at_right, known, dim)
    mask = valid[:, None] & known[None, :]
    own = coefficients + places[:, None] * features + f[None, :]
    query = a * b * tl.load(own, mask=mask, other=0.0)

    one = tl.arange(0, 16)  # the only key, in a tile as high as a matrix product takes
    only = one == 0
    key_places = state + one * 0
    a, b = load_features(k, key_places, only, at_left, at_right, known, dim)
    across = tl.trans(a * b)

    kappa = tl.full((heads, 16), 0.0, tl.float32) + eps
    vectors = load_vectors(q, places, valid, dim, wide)
    keys = tl.trans(load_vectors(k, key_places, only, dim, wide))
    column = tl.arange(0, wide)
    count = tl.where(block == 0, tl.load(counts + state), 0)
    for component in range(0, count):
        line = places * components + component
        inside = valid[:, None] & (column < dim)[None, :]
        pointers = slope + line[:, None] * dim + column[None, :]
        inclined = vectors * tl.load(pointers, mask=inside, other=0.0)
        shift = tl.load(offset + line, mask=valid, other=0.0)
        score = tl.dot(inclined, keys, input_precision=precision) + shift[:, None]
        kappa += score * score
    kappa = tl.where(only[None, :] & (block == 0), kappa, 0.0)

    base = state * features + f
    line = (block * tl.num_programs(1) * r + places)[:, None] * channels
    old = load_channels(before, base, known, 0, channels, width)
    new = load_channels(u, key_places, only, 0, channels, width)
    total = tl.dot(query, old, input_precision=precision)
    total += tl.dot(kappa, new, input_precision=precision)
    column = tl.arange(0, width)
    inside = (column < channels)[None, :]
    tl.store(y + line + column[None, :], total, mask=valid[:, None] & inside)
    old += tl.dot(across, new, input_precision=precision)
    tl.store(after + base[:, None] * channels + column[None, :], old, mask=known[:, None] & inside)
    if tail:
        old = load_channels(before, base, known, width, channels, 16)
        new = load_channels(u, key_places, only, width, channels, 16)
        total = tl.dot(query, old, input_precision=precision)
        total += tl.dot(kappa, new, input_precision=precision)
        column = width + tl.arange(0, 16)
        inside = (column < channels)[None, :]
        tl.store(y + line + column[None, :], total, mask=valid[:, None] & inside)
        old += tl.dot(across, new, input_precision=precision)
        pointers = after + base[:, None] * channels + column[None, :]
        tl.store(pointers, old, mask=known[:, None] & inside)
