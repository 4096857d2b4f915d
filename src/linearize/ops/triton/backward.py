"""Kernels of the backward pass: through features, through coefficients, and through pairs."""

# Triton reads the arguments' types at launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from linearize.ops.triton.tiles import (
    head_rows,
    load_channels,
    load_features,
    load_vectors,
    row_offsets,
)

__all__ = ["coefficient_kernel", "feature_kernel", "pair_key_kernel", "pair_row_kernel"]


@triton.jit
def feature_kernel(
    x,
    w,
    states,
    coefficients,
    left,
    right,
    grad,
    tokens,
    chunk,
    tiles,
    r,
    channels,
    features,
    stride_state,
    stride_chunk,
    dim: tl.constexpr,
    wide: tl.constexpr,
    weighted: tl.constexpr,
    block_rows: tl.constexpr,
    block_features: tl.constexpr,
    width: tl.constexpr,
    tail: tl.constexpr,
    precision: tl.constexpr,
):
    """Adds to ``grad_m`` the gradient of ``Σ_f a_f φ_f(x_m) (S_n[f] · w_m)`` in ``x_m``.

    Grid: row tiles, states. A feature's gradient goes to its two coordinates through products with
    matrices that hold a one where a feature has that coordinate.
    """
    n = (tl.program_id(0) // tiles).to(tl.int64)
    state = tl.program_id(1).to(tl.int64)
    last = tl.minimum((n + 1) * chunk, tokens) * r
    rows = n * chunk * r + (tl.program_id(0) % tiles) * block_rows + tl.arange(0, block_rows)
    valid = rows < last
    places = row_offsets(state, rows, tokens, r)
    heads = state * r + rows % r
    base = states + state * stride_state + n * stride_chunk
    weight = load_channels(w, places, valid, 0, channels, width)
    more = load_channels(w, places, valid, width, channels, 16)
    column = tl.arange(0, wide)
    total = load_vectors(grad, places, valid, dim, wide)
    for start in range(0, features, block_features):
        f = start + tl.arange(0, block_features)
        known = f < features
        at_left = tl.load(left + f, mask=known, other=0)
        at_right = tl.load(right + f, mask=known, other=0)
        a, b = load_features(x, places, valid, at_left, at_right, known, dim)
        part = load_channels(base, f, known, 0, channels, width)
        outer = tl.dot(weight, tl.trans(part), input_precision=precision)
        if tail:
            part = load_channels(base, f, known, width, channels, 16)
            outer += tl.dot(more, tl.trans(part), input_precision=precision)
        if weighted:
            mask = valid[:, None] & known[None, :]
            pointers = coefficients + heads[:, None] * features + f[None, :]
            outer = outer * tl.load(pointers, mask=mask, other=0.0)
        to_left = tl.where(at_left[:, None] == column[None, :], 1.0, 0.0)
        to_right = tl.where(at_right[:, None] == column[None, :], 1.0, 0.0)
        total += tl.dot(outer * b, to_left, input_precision=precision)
        total += tl.dot(outer * a, to_right, input_precision=precision)
    mask = valid[:, None] & (column < dim)[None, :]
    tl.store(grad + places[:, None] * dim + column[None, :], total, mask=mask)


@triton.jit
def coefficient_kernel(
    x,
    w,
    states,
    left,
    right,
    grad,
    tokens,
    chunk,
    chunks,
    r,
    channels,
    features,
    stride_state,
    stride_chunk,
    dim: tl.constexpr,
    heads: tl.constexpr,
    block_rows: tl.constexpr,
    block_features: tl.constexpr,
    width: tl.constexpr,
    tail: tl.constexpr,
    precision: tl.constexpr,
):
    """``grad[s, n, h, f] = Σ φ_f(x_m) (S_n[f] · w_m)`` over the rows m of head h in chunk n.

    Grid: feature blocks, chunks, states. ``heads`` is r rounded up to a tile.
    """
    f = tl.program_id(0) * block_features + tl.arange(0, block_features)
    n = tl.program_id(1).to(tl.int64)
    state = tl.program_id(2).to(tl.int64)
    known = f < features
    at_left = tl.load(left + f, mask=known, other=0)
    at_right = tl.load(right + f, mask=known, other=0)
    base = states + state * stride_state + n * stride_chunk
    part = tl.trans(load_channels(base, f, known, 0, channels, width))
    more = tl.trans(load_channels(base, f, known, width, channels, 16))
    total = tl.full((heads, block_features), 0.0, tl.float32)
    last = tl.minimum((n + 1) * chunk, tokens) * r
    for start in range(n * chunk * r, last, block_rows):
        rows = start + tl.arange(0, block_rows)
        valid = rows < last
        places = row_offsets(state, rows, tokens, r)
        a, b = load_features(x, places, valid, at_left, at_right, known, dim)
        weight = load_channels(w, places, valid, 0, channels, width)
        outer = tl.dot(weight, part, input_precision=precision)
        if tail:
            weight = load_channels(w, places, valid, width, channels, 16)
            outer += tl.dot(weight, more, input_precision=precision)
        total += tl.dot(head_rows(rows, valid, r, heads), a * b * outer, input_precision=precision)
    head = tl.arange(0, heads)
    line = ((state * chunks + n) * r + head[:, None]) * features
    mask = (head < r)[:, None] & known[None, :]
    tl.store(grad + line + f[None, :], total, mask=mask)


@triton.jit
def pair_row_kernel(
    q,
    k,
    u,
    grad_y,
    slope,
    offset,
    counts,
    grad_q,
    grad_slope,
    grad_offset,
    tokens,
    chunk,
    tiles,
    r,
    channels,
    components,
    dim: tl.constexpr,
    wide: tl.constexpr,
    heads: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    width: tl.constexpr,
    tail: tl.constexpr,
    precision: tl.constexpr,
):
    """Gradients of the pairs of one row tile: of the queries, and this tile's share of the numbers.

    Grid: row tiles, states. ``grad_slope [s, tiles in all, r, components, dim]`` and
    ``grad_offset [s, tiles in all, r, components]`` start as zeros.
    """
    n = (tl.program_id(0) // tiles).to(tl.int64)
    state = tl.program_id(1).to(tl.int64)
    end = tl.minimum((n + 1) * chunk, tokens)
    first_row = n * chunk * r + (tl.program_id(0) % tiles) * block_rows
    rows = first_row + tl.arange(0, block_rows)
    valid = rows < end * r
    places = row_offsets(state, rows, tokens, r)
    of_row = state * r + rows % r
    token = rows // r
    query = load_vectors(q, places, valid, dim, wide)
    weight = load_channels(grad_y, places, valid, 0, channels, width)
    more = load_channels(grad_y, places, valid, width, channels, 16)
    by_head = head_rows(rows, valid, r, heads)
    ones = tl.full((block_keys, 16), 1.0, tl.float32)
    column = tl.arange(0, wide)
    head = tl.arange(0, heads)
    mask = valid[:, None] & (column < dim)[None, :]
    total = tl.full((block_rows, wide), 0.0, tl.float32)
    count = tl.load(counts + state)
    end = tl.minimum((first_row + block_rows - 1) // r + 1, end)
    share = (state * tl.num_programs(0) + tl.program_id(0)) * r + head
    for component in range(0, count):
        line = of_row * components + component
        pointers = slope + line[:, None] * dim + column[None, :]
        incline = tl.load(pointers, mask=mask, other=0.0)
        shift = tl.load(offset + line, mask=valid, other=0.0)
        inclined = query * incline
        product = tl.full((block_rows, wide), 0.0, tl.float32)
        constant = tl.full((heads, 16), 0.0, tl.float32)
        for start in range(n * chunk, end, block_keys):
            at = start + tl.arange(0, block_keys)
            real = at < tokens
            key_places = state * tokens + at
            keys = load_vectors(k, key_places, real, dim, wide)
            value = load_channels(u, key_places, real, 0, channels, width)
            outer = tl.dot(weight, tl.trans(value), input_precision=precision)
            if tail:
                value = load_channels(u, key_places, real, width, channels, 16)
                outer += tl.dot(more, tl.trans(value), input_precision=precision)
            score = tl.dot(inclined, tl.trans(keys), input_precision=precision) + shift[:, None]
            allowed = (at[None, :] <= token[:, None]) & real[None, :] & valid[:, None]
            outer = tl.where(allowed, 2.0 * score * outer, 0.0)
            product += tl.dot(outer, keys, input_precision=precision)
            summed = tl.dot(by_head, outer, input_precision=precision)
            constant += tl.dot(summed, ones, input_precision=precision)
        total += incline * product
        of_slope = tl.dot(by_head, query * product, input_precision=precision)
        place = share * components + component
        keep = (head < r)[:, None] & (column < dim)[None, :]
        tl.store(grad_slope + place[:, None] * dim + column[None, :], of_slope, mask=keep)
        one = tl.arange(0, 16)
        keep = (head < r)[:, None] & (one == 0)[None, :]
        tl.store(grad_offset + place[:, None] + one[None, :], constant, mask=keep)
    tl.store(grad_q + places[:, None] * dim + column[None, :], total, mask=mask)


@triton.jit
def pair_key_kernel(
    q,
    k,
    u,
    grad_y,
    slope,
    offset,
    counts,
    grad_k,
    grad_u,
    tokens,
    chunk,
    tiles,
    r,
    channels,
    components,
    eps,
    dim: tl.constexpr,
    wide: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    width: tl.constexpr,
    tail: tl.constexpr,
    precision: tl.constexpr,
):
    """Gradients of the pairs of one key tile: of the keys, and added to that of ``u``.

    Grid: key tiles (``tiles`` a chunk), states.
    """
    n = (tl.program_id(0) // tiles).to(tl.int64)
    state = tl.program_id(1).to(tl.int64)
    end = tl.minimum((n + 1) * chunk, tokens)
    first = n * chunk + (tl.program_id(0) % tiles) * block_keys
    at = first + tl.arange(0, block_keys)
    real = at < end
    key_places = state * tokens + at
    keys = load_vectors(k, key_places, real, dim, wide)
    value = load_channels(u, key_places, real, 0, channels, width)
    more = load_channels(u, key_places, real, width, channels, 16)
    column = tl.arange(0, wide)
    of_keys = tl.full((block_keys, wide), 0.0, tl.float32)
    total = load_channels(grad_u, key_places, real, 0, channels, width)
    rest = load_channels(grad_u, key_places, real, width, channels, 16)
    count = tl.load(counts + state)
    for start in range(first * r, end * r, block_rows):
        rows = start + tl.arange(0, block_rows)
        valid = rows < end * r
        places = row_offsets(state, rows, tokens, r)
        of_row = state * r + rows % r
        token = rows // r
        query = load_vectors(q, places, valid, dim, wide)
        weight = load_channels(grad_y, places, valid, 0, channels, width)
        outer = tl.dot(weight, tl.trans(value), input_precision=precision)
        if tail:
            weight_rest = load_channels(grad_y, places, valid, width, channels, 16)
            outer += tl.dot(weight_rest, tl.trans(more), input_precision=precision)
        allowed = (at[None, :] <= token[:, None]) & real[None, :] & valid[:, None]
        outer = tl.where(allowed, outer, 0.0)
        kappa = tl.full((block_rows, block_keys), 0.0, tl.float32) + eps
        for component in range(0, count):
            line = of_row * components + component
            mask = valid[:, None] & (column < dim)[None, :]
            pointers = slope + line[:, None] * dim + column[None, :]
            inclined = query * tl.load(pointers, mask=mask, other=0.0)
            shift = tl.load(offset + line, mask=valid, other=0.0)
            score = tl.dot(inclined, tl.trans(keys), input_precision=precision) + shift[:, None]
            kappa += score * score
            across = tl.trans(2.0 * score * outer)
            of_keys += tl.dot(across, inclined, input_precision=precision)
        across = tl.trans(tl.where(allowed, kappa, 0.0))
        total += tl.dot(across, weight, input_precision=precision)
        if tail:
            rest += tl.dot(across, weight_rest, input_precision=precision)
    mask = real[:, None] & (column < dim)[None, :]
    tl.store(grad_k + key_places[:, None] * dim + column[None, :], of_keys, mask=mask)
    column = tl.arange(0, width)
    line = grad_u + key_places[:, None] * channels
    tl.store(line + column[None, :], total, mask=real[:, None] & (column < channels)[None, :])
    if tail:
        column = width + tl.arange(0, 16)
        tl.store(line + column[None, :], rest, mask=real[:, None] & (column < channels)[None, :])
