"""Kernels of the forward pass: sums of features over a chunk, and outputs from states and pairs."""

# Triton reads the arguments' types at launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from linearize.ops.triton.tiles import load_channels, load_features, load_vectors, row_offsets

__all__ = ["output_kernel", "sum_kernel"]


@triton.jit
def sum_kernel(
    x,
    w,
    coefficients,
    left,
    right,
    out,
    tokens,
    chunk,
    r,
    channels,
    features,
    stride_state,
    stride_chunk,
    dim: tl.constexpr,
    weighted: tl.constexpr,
    block_rows: tl.constexpr,
    block_features: tl.constexpr,
    width: tl.constexpr,
    tail: tl.constexpr,
    precision: tl.constexpr,
):
    """``out[s, n, f, c] = Σ a_f φ_f(x_m) w_m[c]`` over the rows m of chunk n of state s.

    Grid: feature blocks, chunks, states. ``x [H, N, dim]``, ``w [H, N, channels]``, ``a [H, F]`` if
    ``weighted`` (else one), ``H = states · r``.
    """
    f = tl.program_id(0) * block_features + tl.arange(0, block_features)
    n = tl.program_id(1).to(tl.int64)
    state = tl.program_id(2).to(tl.int64)
    known = f < features
    at_left = tl.load(left + f, mask=known, other=0)
    at_right = tl.load(right + f, mask=known, other=0)
    total = tl.full((block_features, width), 0.0, tl.float32)
    rest = tl.full((block_features, 16), 0.0, tl.float32)
    first = n * chunk * r
    last = tl.minimum((n + 1) * chunk, tokens) * r
    for start in range(first, last, block_rows):
        rows = start + tl.arange(0, block_rows)
        valid = rows < last
        places = row_offsets(state, rows, tokens, r)
        a, b = load_features(x, places, valid, at_left, at_right, known, dim)
        product = a * b
        if weighted:
            heads = state * r + rows % r
            mask = valid[:, None] & known[None, :]
            pointers = coefficients + heads[:, None] * features + f[None, :]
            product = product * tl.load(pointers, mask=mask, other=0.0)
        across = tl.trans(product)
        here = load_channels(w, places, valid, 0, channels, width)
        total += tl.dot(across, here, input_precision=precision)
        if tail:
            here = load_channels(w, places, valid, width, channels, 16)
            rest += tl.dot(across, here, input_precision=precision)
    base = out + state * stride_state + n * stride_chunk + f[:, None] * channels
    column = tl.arange(0, width)
    tl.store(base + column[None, :], total, mask=known[:, None] & (column < channels)[None, :])
    if tail:
        column = width + tl.arange(0, 16)
        tl.store(base + column[None, :], rest, mask=known[:, None] & (column < channels)[None, :])


@triton.jit
def output_kernel(
    x,
    k,
    u,
    states,
    coefficients,
    slope,
    offset,
    counts,
    left,
    right,
    y,
    tokens,
    chunk,
    tiles,
    r,
    channels,
    features,
    components,
    stride_state,
    stride_chunk,
    has_state,
    eps,
    dim: tl.constexpr,
    wide: tl.constexpr,
    weighted: tl.constexpr,
    pairs: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_features: tl.constexpr,
    width: tl.constexpr,
    tail: tl.constexpr,
    precision: tl.constexpr,
):
    """``y_m = Σ_f a_f φ_f(x_m) S_n[f] + Σ_{j≤m in chunk n} κ(x_m, k_j) u_j``, the second if ``pairs``.

    Grid: row tiles (``tiles`` a chunk), states. ``states [s, n, F, channels]`` by its strides,
    ``k [s, N, dim]``, ``u [s, N, channels]``, ``slope [H, components, dim]``,
    ``offset [H, components]``; ``counts [s]`` is how many components the heads of a state use.
    Without ``has_state`` the first chunk reads none.
    """
    n = (tl.program_id(0) // tiles).to(tl.int64)
    state = tl.program_id(1).to(tl.int64)
    last = tl.minimum((n + 1) * chunk, tokens) * r
    rows = n * chunk * r + (tl.program_id(0) % tiles) * block_rows + tl.arange(0, block_rows)
    valid = rows < last
    places = row_offsets(state, rows, tokens, r)
    heads = state * r + rows % r
    total = tl.full((block_rows, width), 0.0, tl.float32)
    rest = tl.full((block_rows, 16), 0.0, tl.float32)

    base = states + state * stride_state + n * stride_chunk
    stop = tl.where(n + has_state > 0, features, 0)
    for start in range(0, stop, block_features):
        f = start + tl.arange(0, block_features)
        known = f < features
        at_left = tl.load(left + f, mask=known, other=0)
        at_right = tl.load(right + f, mask=known, other=0)
        a, b = load_features(x, places, valid, at_left, at_right, known, dim)
        product = a * b
        if weighted:
            mask = valid[:, None] & known[None, :]
            pointers = coefficients + heads[:, None] * features + f[None, :]
            product = product * tl.load(pointers, mask=mask, other=0.0)
        part = load_channels(base, f, known, 0, channels, width)
        total += tl.dot(product, part, input_precision=precision)
        if tail:
            part = load_channels(base, f, known, width, channels, 16)
            rest += tl.dot(product, part, input_precision=precision)

    if pairs:
        query = load_vectors(x, places, valid, dim, wide)
        count = tl.load(counts + state)
        column = tl.arange(0, wide)
        token = rows // r
        first_row = n * chunk * r + (tl.program_id(0) % tiles) * block_rows
        end = tl.minimum((first_row + block_rows - 1) // r + 1, tl.minimum((n + 1) * chunk, tokens))
        for start in range(n * chunk, end, block_keys):
            at = start + tl.arange(0, block_keys)
            real = at < tokens
            key_places = state * tokens + at
            across = tl.trans(load_vectors(k, key_places, real, dim, wide))
            kappa = tl.full((block_rows, block_keys), 0.0, tl.float32) + eps
            for component in range(0, count):
                line = heads * components + component
                mask = valid[:, None] & (column < dim)[None, :]
                pointers = slope + line[:, None] * dim + column[None, :]
                inclined = query * tl.load(pointers, mask=mask, other=0.0)
                shift = tl.load(offset + line, mask=valid, other=0.0)
                score = tl.dot(inclined, across, input_precision=precision) + shift[:, None]
                kappa += score * score
            allowed = (at[None, :] <= token[:, None]) & real[None, :] & valid[:, None]
            kappa = tl.where(allowed, kappa, 0.0)
            part = load_channels(u, key_places, real, 0, channels, width)
            total += tl.dot(kappa, part, input_precision=precision)
            if tail:
                part = load_channels(u, key_places, real, width, channels, 16)
                rest += tl.dot(kappa, part, input_precision=precision)

    column = tl.arange(0, width)
    line = y + places[:, None] * channels
    tl.store(line + column[None, :], total, mask=valid[:, None] & (column < channels)[None, :])
    if tail:
        column = width + tl.arange(0, 16)
        tl.store(line + column[None, :], rest, mask=valid[:, None] & (column < channels)[None, :])
