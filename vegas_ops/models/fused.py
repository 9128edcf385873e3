"""A decoder layer's linear layers with what surrounds them, as few kernels as possible on a GPU.

A decoding step of a small model costs launches more than arithmetic, and of a large one it costs the
weights' bytes: both want RMSNorm, SiLU and the residual inside the kernel that reads the weights, and
QK-norm, RoPE and the write to the cache in one kernel. Triton (which torch's GPU builds bring along)
compiles them when they are first called; where it cannot run, `Linear` and torch's operators do.

All rows are computed alike whatever their number: a row's bits depend on the tile shape alone.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vegas_ops import jit

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch without a GPU
    triton = None

BLOCK_IN = 128  # input features of a step
_WIDE = 2048  # input features from which on weights alone count


def available(x: Tensor) -> bool:
    """Whether the kernels run on this tensor's device, in its dtype."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and jit.works(x.device)


def serves(rows: int | None, in_features: int) -> bool:
    """Whether so many rows are better off here than in a library's matrix product; None: whether any
    number of rows can be computed."""
    return in_features % BLOCK_IN == 0 and (rows or 0) <= (64 if in_features > _WIDE else 512)


def rotates(head_dim: int) -> bool:
    """Whether `rotate` takes heads of this size."""
    return head_dim & (head_dim - 1) == 0


if triton is not None:

    @triton.jit
    def _linear_kernel(
        x, weight, norm, residual, out, rows, n_out, x_stride, eps,
        N_IN: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        row, column = m < rows, n < n_out
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        gated = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        x_tile = x + m[:, None] * x_stride + k[None, :]
        w_tile = weight + n[None, :] * N_IN + k[:, None]
        for start in range(0, N_IN, BLOCK_K):
            a = tl.load(x_tile + start, mask=row[:, None], other=0.0)
            w = tl.load(w_tile + start, mask=column[None, :], other=0.0)
            if NORM:
                # The norm's factor of the whole row is known at the end, and is linear.
                wide = a.to(tl.float32)
                squares += wide * wide
                a = (wide * tl.load(norm + start + k).to(tl.float32)[None, :]).to(a.dtype)
            sums = tl.dot(a, w, sums)
            if GATED:
                up = tl.load(w_tile + n_out * N_IN + start, mask=column[None, :], other=0.0)
                gated = tl.dot(a, up, gated)
        if NORM:
            factor = tl.rsqrt(tl.sum(squares, 1) / N_IN + eps)[:, None]
            sums *= factor
            gated *= factor
        if GATED:
            sums = sums * tl.sigmoid(sums) * gated
        place, inside = m[:, None] * n_out + n[None, :], row[:, None] & column[None, :]
        if RESIDUAL:
            sums += tl.load(residual + place, mask=inside).to(tl.float32)
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _norm_kernel(x, norm, out, x_stride, eps, N: tl.constexpr, BLOCK: tl.constexpr):
        row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = i < N
        wide = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
        weight = tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * N + i, (wide * factor * weight).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _rotate_kernel(
        qkv, norm, rope, positions, slots, k_cache, v_cache, eps,
        Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
        APPEND: tl.constexpr,
    ):  # fmt: skip
        """One row: QK-norm and RoPE of its heads, in place; K and V into the cache."""
        row = tl.program_id(0).to(tl.int64)
        head, pair = tl.arange(0, BLOCK), tl.arange(0, DIM // 2)
        rotated, known = head < Q_HEADS + KV_HEADS, head < Q_HEADS + 2 * KV_HEADS
        place = head[:, None] * DIM + tl.arange(0, DIM)[None, :]
        base = qkv + row * ((Q_HEADS + 2 * KV_HEADS) * DIM)
        loaded = tl.load(base + place, mask=known[:, None], other=0.0)
        even, odd = tl.split(loaded.to(tl.float32).reshape(BLOCK, DIM // 2, 2))
        weights = tl.load(norm + place, mask=rotated[:, None], other=0.0)
        even_weight, odd_weight = tl.split(weights.reshape(BLOCK, DIM // 2, 2))
        factor = tl.rsqrt(tl.sum(even * even + odd * odd, 1) / DIM + eps)[:, None]
        even, odd = even * factor * even_weight, odd * factor * odd_weight
        angle = rope + tl.load(positions + row) * DIM + 2 * pair
        cosine, sine = tl.load(angle)[None, :], tl.load(angle + 1)[None, :]
        turned = tl.interleave(even * cosine - odd * sine, even * sine + odd * cosine).to(loaded.dtype)
        here = rotated
        if APPEND:
            here = head < Q_HEADS
            slot = tl.load(slots + row) * (KV_HEADS * DIM)
            key, value = rotated & (head >= Q_HEADS), known & (head >= Q_HEADS + KV_HEADS)
            tl.store(k_cache + slot + place - Q_HEADS * DIM, turned, mask=key[:, None])
            tl.store(v_cache + slot + place - (Q_HEADS + KV_HEADS) * DIM, loaded, mask=value[:, None])
        tl.store(base + place, turned, mask=here[:, None])


def _tiles(rows: int, n_in: int, n_out: int, gated: bool) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, warps, stages; measured on an H200. Of small weights, which lie in the
    L2 cache, few long steps and many small tiles; of large ones, as many bytes in flight as fit."""
    if n_in <= _WIDE:
        if rows > 16:
            return 32, 32, 256 if n_in % 256 == 0 else BLOCK_IN, 4, 3
        if n_out > 4096:
            return 16, 64, BLOCK_IN, 4, 4
        return 16, 16, next(k for k in (512, 256, BLOCK_IN) if n_in % k == 0), 4, 3
    block_m = min(max(triton.next_power_of_2(rows), 16), 64)
    if block_m > 32:
        return block_m, 64, BLOCK_IN, 4, 4
    return (block_m, 64, BLOCK_IN, 4, 4) if n_out * (1 + gated) > 8192 else (block_m, 32, BLOCK_IN, 4, 6)


def rms_norm(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """RMSNorm of (rows, features), in fp32, rounded once; by torch where the kernels do not run."""
    if not available(x):
        return torch.rms_norm(x, norm.shape, norm, eps)
    return _rms_norm(x, norm, eps)


def _rms_norm(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    rows, n = x.shape
    out = x.new_empty((rows, n))
    if rows:
        _norm_kernel[(rows,)](
            x, norm, out, x.stride(0), eps, N=n, BLOCK=triton.next_power_of_2(n),
            num_warps=4 if n <= _WIDE else 8,
        )  # fmt: skip
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    fixed: bool = False,
) -> Tensor:
    """`f(norm(x)) @ weight.T + residual` in one kernel, in fp32, rounded once.

    x: (rows, in_features), rows contiguous; weight: (out_features, in_features); norm: (in_features,),
    weight of an RMSNorm; gated: of weight's two halves, SiLU of the first times the second; residual
    (rows, out_features) is overwritten and returned; dtype: of the result, default x's. fixed: the same
    tiles for every number of rows. in_features must be a multiple of `BLOCK_IN`.
    """
    if norm is not None and x.shape[1] > _WIDE:
        x, norm = _rms_norm(x, norm, eps), None  # in a long loop it would hold up the weights
    (rows, n_in), n_out = x.shape, weight.shape[0] // (2 if gated else 1)
    out = x.new_empty((rows, n_out), dtype=dtype) if residual is None else residual
    block_m, block_n, block_k, warps, stages = _tiles(64 if fixed else rows, n_in, n_out, gated)
    grid = (triton.cdiv(n_out, block_n), triton.cdiv(rows, block_m))
    if rows:
        _linear_kernel[grid](
            x, weight, norm, residual, out, rows, n_out, x.stride(0), eps,
            N_IN=n_in, NORM=norm is not None, GATED=gated, RESIDUAL=residual is not None,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


def rotate(
    qkv: Tensor, norm: Tensor, rope: Tensor, positions: Tensor, eps: float, target: Any = None
) -> None:
    """QK-norm and RoPE in place, in fp32, rounded once; with a target K and V go to the cache, and what
    lies in their place is undefined.

    qkv: (rows, num_heads_q + 2 num_heads_kv, head_dim), contiguous; norm: (num_heads_q + num_heads_kv,
    head_dim) fp32; rope: (positions, head_dim / 2) complex64, factors of neighbouring dimensions;
    positions: (rows,) int64; target: `speculative.model.KVTarget`.
    """
    rows, heads, dim = qkv.shape
    kv_heads = heads - norm.shape[0]
    k, v, slots = (None, None, None) if target is None else target
    if rows:
        _rotate_kernel[(rows,)](
            qkv, norm, torch.view_as_real(rope), positions, slots, k, v, eps,
            Q_HEADS=heads - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim,
            BLOCK=triton.next_power_of_2(heads), APPEND=target is not None,
        )  # fmt: skip
