"""A decoder layer's linear layers with what surrounds them, as few kernels as possible on a GPU.

A decoding step of a small model costs launches more than arithmetic, and of a large one it costs the
weights' bytes: both want RMSNorm, SiLU and the residual inside the kernel that reads the weights, and
QK-norm, RoPE and the write to the cache in one kernel. Triton (which torch's GPU builds bring along)
compiles them when they are first called; where it cannot run, `Linear` and torch's operators do.

All rows are computed alike whatever their number: a row's bits depend on the tile shape alone.
"""

# mypy: disable-error-code="no-untyped-def, var-annotated, assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vegas_ops import jit
from vegas_ops.jit import gdc_launch_dependents, gdc_wait
from vegas_ops.models import wide
from vegas_ops.models.wide import Scaled

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch without a GPU
    triton = None

BLOCK_IN = 128  # input features of a step
_ROOMY = 200 << 10  # bytes of shared memory that all tiles fit into
_HELD = 128 << 10  # bytes of a tile that is held whole
_ROTATED = 4  # heads of a thread block of `rotate`
_WIDE = 1280  # input features from which on weights alone count (`wide`)


def available(x: Tensor) -> bool:
    """Whether the kernels run on this tensor's device, in its dtype."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and jit.works(x.device)


def serves(rows: int | None, in_features: int, logits: bool = False) -> bool:
    """Whether so many rows are better off here than in a library's matrix product; None: whether any
    number of rows can be computed; logits: of a result in fp32."""
    if in_features > _WIDE:
        return in_features % wide.LEAST_IN == 0 and (rows or 0) <= (64 if logits else wide.MOST_ROWS)
    return in_features % BLOCK_IN == 0 and (rows or 0) <= (1024 if logits else 128)


def rotates(head_dim: int) -> bool:
    """Whether `rotate` takes heads of this size."""
    return head_dim & (head_dim - 1) == 0


if triton is not None:

    @triton.jit(do_not_specialize=["rows"])
    def _linear_kernel(
        x, weight, norm, residual, out, rows, n_out, x_stride, eps,
        N_IN: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINS: tl.constexpr,
        HELD: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """HELD: all weights of a tile are loaded at once, before the launch before this one has ended;
        otherwise step by step. CHAINS: sums that take turns, since an MMA waits for the one before it into
        the same; one, if not HELD."""
        m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        row, column = (m < rows)[:, None], (n < n_out)[None, :]
        sums, gated = (), ()
        for _ in tl.static_range(CHAINS):
            sums += (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
            gated += (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
        squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        x_tile = x + m[:, None] * x_stride + k[None, :]
        w_tile = weight + n[None, :] * N_IN + k[:, None]
        if HELD:
            if DEPENDENT:
                gdc_launch_dependents()
            held, held_up, held_norm = (), (), ()
            for step in tl.static_range(N_IN // BLOCK_K):
                held += (tl.load(w_tile + step * BLOCK_K, mask=column, other=0.0),)
                if GATED:
                    held_up += (tl.load(w_tile + n_out * N_IN + step * BLOCK_K, mask=column, other=0.0),)
                if NORM:
                    held_norm += (tl.load(norm + step * BLOCK_K + k).to(tl.float32)[None, :],)
            if DEPENDENT:
                gdc_wait()
            rows_of_x = ()
            for step in tl.static_range(N_IN // BLOCK_K):
                rows_of_x += (tl.load(x_tile + step * BLOCK_K, mask=row, other=0.0),)
            for first in tl.static_range(0, N_IN // BLOCK_K, CHAINS):
                next_sums, next_gated = (), ()
                for chain in tl.static_range(CHAINS):
                    a = rows_of_x[first + chain]
                    if NORM:
                        wide_a = a.to(tl.float32)
                        squares += wide_a * wide_a
                        a = (wide_a * held_norm[first + chain]).to(a.dtype)
                    next_sums += (tl.dot(a, held[first + chain], sums[chain]),)
                    if GATED:
                        next_gated += (tl.dot(a, held_up[first + chain], gated[chain]),)
                sums = next_sums
                if GATED:
                    gated = next_gated
        else:
            if DEPENDENT:
                gdc_wait()
            for step in range(0, N_IN, BLOCK_K):
                a = tl.load(x_tile + step, mask=row, other=0.0)
                w = tl.load(w_tile + step, mask=column, other=0.0)
                if NORM:
                    # The norm's factor of the whole row is known at the end, and is linear.
                    wide_a = a.to(tl.float32)
                    squares += wide_a * wide_a
                    a = (wide_a * tl.load(norm + step + k).to(tl.float32)[None, :]).to(a.dtype)
                sums = (tl.dot(a, w, sums[0]),)
                if GATED:
                    up = tl.load(w_tile + n_out * N_IN + step, mask=column, other=0.0)
                    gated = (tl.dot(a, up, gated[0]),)
            if DEPENDENT:
                # Not before: the next launch's blocks would crowd on the multiprocessors that are free first.
                gdc_launch_dependents()
        total, total_gated = sums[0], gated[0]
        for chain in tl.static_range(1, CHAINS):
            total += sums[chain]
            if GATED:
                total_gated += gated[chain]
        if NORM:
            factor = tl.rsqrt(tl.sum(squares, 1) / N_IN + eps)[:, None]
            total *= factor
            total_gated *= factor
        if GATED:
            total = total * tl.sigmoid(total) * total_gated
        place, inside = m[:, None] * n_out + n[None, :], row & column
        if RESIDUAL:
            total += tl.load(residual + place, mask=inside).to(tl.float32)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["rows"])
    def _qkv_kernel(
        x, weight, norm, head_norm, rope, positions, slots, out, k_cache, v_cache, rows, x_stride, eps,
        N_IN: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """One head of some rows: RMSNorm, the matrix product, QK-norm and RoPE; K and V into the cache."""
        head, pair = tl.program_id(0), tl.arange(0, DIM // 2)
        m, n = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, DIM)
        k = tl.arange(0, BLOCK_K)
        row = m < rows
        if DEPENDENT:
            gdc_launch_dependents()
        held, held_norm = (), ()
        for step in tl.static_range(N_IN // BLOCK_K):
            held += (tl.load(weight + (head * DIM + n[None, :]) * N_IN + step * BLOCK_K + k[:, None]),)
            held_norm += (tl.load(norm + step * BLOCK_K + k).to(tl.float32)[None, :],)
        rotated = head < Q_HEADS + KV_HEADS
        weights = tl.load(head_norm + head * DIM + n, mask=(n < DIM) & rotated, other=1.0)
        if DEPENDENT:
            gdc_wait()
        rows_of_x = ()
        for step in tl.static_range(N_IN // BLOCK_K):
            place = x + m[:, None] * x_stride + step * BLOCK_K + k[None, :]
            rows_of_x += (tl.load(place, mask=row[:, None], other=0.0),)
        position = tl.load(positions + m, mask=row, other=0)
        slot = tl.load(slots + m, mask=row, other=0)
        angle = rope + position[:, None] * DIM + 2 * pair[None, :]
        cosine, sine = tl.load(angle), tl.load(angle + 1)
        sums = tl.zeros((BLOCK_M, DIM), tl.float32)
        squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for step in tl.static_range(N_IN // BLOCK_K):
            wide = rows_of_x[step].to(tl.float32)
            squares += wide * wide
            sums = tl.dot((wide * held_norm[step]).to(rows_of_x[step].dtype), held[step], sums)
        sums *= tl.rsqrt(tl.sum(squares, 1) / N_IN + eps)[:, None]
        factor = tl.where(rotated, tl.rsqrt(tl.sum(sums * sums, 1) / DIM + eps), 1.0)
        even, odd = tl.split((sums * factor[:, None] * weights[None, :]).reshape(BLOCK_M, DIM // 2, 2))
        cosine, sine = tl.where(rotated, cosine, 1.0), tl.where(rotated, sine, 0.0)
        turned = tl.interleave(even * cosine - odd * sine, even * sine + odd * cosine)
        turned = turned.to(out.dtype.element_ty)
        place = m[:, None] * (Q_HEADS * DIM) + head * DIM + n[None, :]
        tl.store(out + place, turned, mask=(row & (head < Q_HEADS))[:, None])
        kept = slot[:, None] * (KV_HEADS * DIM) + n[None, :]
        is_key = (head >= Q_HEADS) & rotated
        tl.store(k_cache + kept + (head - Q_HEADS) * DIM, turned, mask=(row & is_key)[:, None])
        value = kept + (head - Q_HEADS - KV_HEADS) * DIM
        tl.store(v_cache + value, turned, mask=(row & (head >= Q_HEADS + KV_HEADS))[:, None])

    @triton.jit
    def _norm_kernel(
        x, norm, out, x_stride, eps, N: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
    ):  # fmt: skip
        row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = i < N
        if DEPENDENT:
            gdc_launch_dependents()
        weight = tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
        if DEPENDENT:
            gdc_wait()
        wide = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
        tl.store(out + row * N + i, (wide * factor * weight).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _gate_kernel(x, out, N: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
        row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        gate = tl.load(x + row * 2 * N + i, mask=i < N, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * N + N + i, mask=i < N, other=0.0).to(tl.float32)
        tl.store(out + row * N + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=i < N)

    @triton.jit
    def _embed_kernel(token_ids, weight, out, N: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
        row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        token = tl.load(token_ids + row).to(tl.int64)
        tl.store(out + row * N + i, tl.load(weight + token * N + i, mask=i < N), mask=i < N)

    @triton.jit
    def _rotate_kernel(
        qkv, norm, rope, positions, slots, k_cache, v_cache, eps,
        Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
        APPEND: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """Some heads of a row: QK-norm and RoPE, in place; K and V into the cache."""
        row = tl.program_id(0).to(tl.int64)
        head, pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM // 2)
        rotated, known = head < Q_HEADS + KV_HEADS, head < Q_HEADS + 2 * KV_HEADS
        place = head[:, None] * DIM + tl.arange(0, DIM)[None, :]
        base = qkv + row * ((Q_HEADS + 2 * KV_HEADS) * DIM)
        if DEPENDENT:
            gdc_launch_dependents()
        weights = tl.load(norm + place, mask=rotated[:, None], other=0.0)
        if DEPENDENT:
            gdc_wait()
        loaded = tl.load(base + place, mask=known[:, None], other=0.0)
        even, odd = tl.split(loaded.to(tl.float32).reshape(BLOCK, DIM // 2, 2))
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


class _Tiles(NamedTuple):
    """held: a tile's weights are loaded at once; chains: sums that take turns."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    held: bool = False
    chains: int = 1


def _tiles(rows: int, n_in: int, n_out: int, gated: bool) -> _Tiles:
    """Of small weights, which lie in the L2 cache: small tiles that are held whole. Measured on an H200."""
    k = next(k for k in (256, BLOCK_IN) if n_in % k == 0)
    if rows > 16:
        if rows > 128 and n_out > 4096:
            return _Tiles(64, 128, 64, 8, 3)
        if n_out > 4096:
            return _Tiles(64, 64, BLOCK_IN, 4, 4)
        if rows <= 64 and 2 * n_in * (16 + 32 * (1 + gated)) <= _HELD:
            if gated and n_in % 512 == 0:
                return _Tiles(16, 32, BLOCK_IN, 4, 3, held=True, chains=4)
            return _Tiles(16, 32, 512 if n_in % 512 == 0 else k, 4, 3, held=True)
        m = 32 if n_in <= 512 or gated or n_out > 1024 else 64
        return _Tiles(m, 32, k, 4, 3, held=n_in <= 512)
    n = 64 if n_out > 4096 else 32
    if 2 * n_in * (16 + n * (1 + gated)) > _HELD:
        return _Tiles(16, 32, k, 4, 3)
    return _Tiles(16, n, 512 if n_in % 512 == 0 else k, 4, 3, held=True)


def _fitting(tiles: _Tiles, device: torch.device) -> _Tiles:
    """The tiles, or small ones on a GPU whose thread blocks have too little memory for some of them."""
    return tiles if _roomy(device) else _Tiles(min(tiles.m, 32), 32, BLOCK_IN, 4, 3)


def _roomy(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", _ROOMY) >= _ROOMY


def embed(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows `token_ids`, (rows,) contiguous integers, of weight (vocab_size, features)."""
    if not available(weight) or not token_ids.is_contiguous():
        return weight[token_ids]
    rows, n = token_ids.shape[0], weight.shape[1]
    out = weight.new_empty((rows, n))
    if rows:
        _embed_kernel[(rows,)](
            token_ids, weight, out, N=n, BLOCK=triton.next_power_of_2(n), num_warps=4,
            **jit.launch_options(weight.device),
        )  # fmt: skip
    return out


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
            num_warps=4 if n <= 2048 else 8, **jit.launch_options(x.device),
        )  # fmt: skip
    return out


def gate(x: Tensor) -> Tensor:
    """SiLU of the first half of x's features, (rows, 2 features) contiguous, times the second half."""
    if not available(x):
        first, second = x.chunk(2, 1)
        return torch.nn.functional.silu(first).mul_(second)
    rows, n = x.shape[0], x.shape[1] // 2
    out = x.new_empty((rows, n))
    if rows:
        _gate_kernel[(rows, triton.cdiv(n, 2048))](
            x, out, N=n, BLOCK=min(triton.next_power_of_2(n), 2048), **jit.launch_options(x.device)
        )
    return out


def linear(
    x: Tensor | Scaled,
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

    x: (rows, in_features), rows contiguous, or, of so many features that `norms_apart`, `Scaled`; weight:
    (out_features, in_features); norm: (in_features,), weight of an RMSNorm; gated: of weight's two halves,
    SiLU of the first times the second; residual (rows, out_features) is overwritten and returned; dtype: of
    the result, default x's. fixed: the same tiles for every number of rows. in_features: as `serves` wants.
    """
    if norms_apart(weight.shape[1]):
        if norm is not None and not isinstance(x, Scaled):
            x = _rms_norm(x, norm, eps)
        return wide.product(x, weight, eps, gated, residual, dtype, fixed)[0]
    assert not isinstance(x, Scaled)
    (rows, n_in), n_out = x.shape, weight.shape[0] // (2 if gated else 1)
    out = x.new_empty((rows, n_out), dtype=dtype) if residual is None else residual
    tiles = _fitting(_tiles(64 if fixed else rows, n_in, n_out, gated), x.device)
    if rows:
        _linear_kernel[(triton.cdiv(n_out, tiles.n), triton.cdiv(rows, tiles.m))](
            x, weight, norm, residual, out, rows, n_out, x.stride(0), eps,
            N_IN=n_in, NORM=norm is not None, GATED=gated, RESIDUAL=residual is not None, BLOCK_M=tiles.m,
            BLOCK_N=tiles.n, BLOCK_K=tiles.k, CHAINS=tiles.chains, HELD=tiles.held, num_warps=tiles.warps,
            num_stages=tiles.stages, **jit.launch_options(x.device),
        )  # fmt: skip
    return out


def scaling_linear(
    x: Tensor, weight: Tensor, residual: Tensor, next_norm: Tensor, fixed: bool = False
) -> tuple[Tensor, Scaled]:
    """`linear` with a residual, and the first half of the RMSNorm behind it with the weights next_norm; for
    weights of which input and output features are so many that `norms_apart`."""
    out, scaled = wide.product(x, weight, residual=residual, next_norm=next_norm, fixed=fixed)
    assert scaled is not None
    return out, scaled


def norms_apart(features: int) -> bool:
    """Whether RMSNorm of so many features is not a part of the matrix product behind it: in a long loop it
    would hold up the weights."""
    return features > _WIDE


def joins(in_features: int, head_dim: int, device: torch.device) -> bool:
    """Whether `rotated_heads` serves: a head's weights fit into a thread block's memory."""
    fits = in_features * head_dim <= 1 << 15 and head_dim >= 16 and _roomy(device)
    return in_features % BLOCK_IN == 0 and rotates(head_dim) and fits


def rotated_heads(
    x: Tensor, weight: Tensor, norm: Tensor, head_norm: Tensor, rope: Tensor, positions: Tensor, eps: float,
    target: Any, fixed: bool = False,
) -> Tensor:  # fmt: skip
    """`linear` over a norm and `rotate` in one kernel: queries (rows, num_heads_q, head_dim); K and V go to
    the cache. Arguments as of the two; where `joins` and `rotates`."""
    (rows, n_in), dim = x.shape, head_norm.shape[1]
    heads = weight.shape[0] // dim
    kv_heads = heads - head_norm.shape[0]
    q_heads = heads - 2 * kv_heads
    out = x.new_empty((rows, q_heads, dim))
    block_m, block_k = 16, next(k for k in (512, 256, BLOCK_IN) if n_in % k == 0)
    if rows:
        _qkv_kernel[(heads, triton.cdiv(rows, block_m))](
            x, weight, norm, head_norm, torch.view_as_real(rope), positions, target.slots, out, target.k,
            target.v, rows, x.stride(0), eps,
            N_IN=n_in, Q_HEADS=q_heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_M=block_m, BLOCK_K=block_k,
            num_warps=4 if fixed or rows > 16 else 8, **jit.launch_options(x.device),
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
        _rotate_kernel[(rows, triton.cdiv(heads, _ROTATED))](
            qkv, norm, torch.view_as_real(rope), positions, slots, k, v, eps,
            Q_HEADS=heads - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim,
            BLOCK=_ROTATED, APPEND=target is not None, **jit.launch_options(qkv.device),
        )  # fmt: skip
