"""Matrix products of few rows by weights of many input features: what they cost is the weights' bytes.

Each multiprocessor has one thread block, which reads its share of the weights, all blocks the same, through
a pipeline that fills its memory: so the next launch's blocks may come as soon as one has ended, and do not
crowd on the multiprocessors that are free first. The weights are the first operand of the MMA, whose 64 rows
few rows of input would not fill.
"""

# mypy: disable-error-code="no-untyped-def, var-annotated, assignment, misc"

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from vegas_ops import jit
from vegas_ops.jit import gdc_launch_dependents, gdc_wait

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch without a GPU
    triton = None

LEAST_IN = 64  # divides the input features
MOST_ROWS = 32  # that take less time here than in a library's product
FIXED_ROWS = 64  # of a tile, if it is to be the same for every number of rows
_HIGHEST = 192  # rows of weights of a tile
_ROOM = 227 << 10  # bytes of shared memory of a thread block


class Scaled(NamedTuple):
    """Rows on their way through an RMSNorm: times its weights, (rows, features), and the sums of their
    squares in parts, (rows, parts) fp32, from which follows what is left to multiply by."""

    rows: Tensor
    squares: Tensor


if triton is not None:

    @triton.jit
    def _part(tile, part: tl.constexpr, HEIGHT: tl.constexpr, n_out, GATED: tl.constexpr):
        """A part of 64 rows of a tile: rows of the weights, and which are the tile's own; gated: 32 of the
        first half and those that belong to them of the second."""
        i = tl.arange(0, 64)
        if GATED:
            n = tile * (HEIGHT // 2) + part * 32 + i % 32
            return tl.minimum(n, n_out - 1) + i // 32 * n_out, part * 32 + i % 32 < HEIGHT // 2
        return tl.minimum(tile * HEIGHT + part * 64 + i, n_out - 1), part * 64 + i < HEIGHT

    @triton.jit(do_not_specialize=["rows"])
    def _wide_kernel(
        x, weight, x_squares, residual, out, next_norm, scaled, next_squares, rows, n_out, parts, x_stride,
        eps,
        N_IN: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
        SCALES: tl.constexpr, BLOCK_M: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_K: tl.constexpr,
        STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """A tile of HEIGHT rows of weights. PARTS: x is scaled by a norm's weights already, and the sum of
        its squares is in `parts`, PARTS at most. SCALES: the output, rounded, times a norm's weights goes to
        `scaled`, and sums of its squares to `next_squares`."""
        C: tl.constexpr = (HEIGHT + 63) // 64
        tile, m, k = tl.program_id(0), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
        m += tl.program_id(1) * BLOCK_M
        row = (m < rows)[None, :]
        sums, w_tiles, owns = (), (), ()
        for c in tl.static_range(C):
            of_weights, own = _part(tile, c, HEIGHT, n_out, GATED)
            sums += (tl.zeros((64, BLOCK_M), tl.float32),)
            w_tiles += (weight + of_weights.to(tl.int64)[:, None] * N_IN,)
            owns += (own[:, None],)
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        # What the end needs is loaded first, since nothing hides its latency there.
        if PARTS:
            part = tl.arange(0, PARTS)[:, None]
            place = x_squares + m[None, :] * parts + part
            squares = tl.load(place, mask=row & (part < parts), other=0.0)
        residuals, norms = (), ()
        for c in tl.static_range(C):
            n = tile * HEIGHT + c * 64 + tl.arange(0, 64)[:, None]
            inside = owns[c] & (n < n_out)
            if RESIDUAL:
                residuals += (tl.load(residual + m[None, :] * n_out + n, mask=row & inside, other=0.0),)
            if SCALES:
                norms += (tl.load(next_norm + n, mask=inside, other=0.0).to(tl.float32),)
        x_tile = x + m[None, :] * x_stride + k[:, None]
        for start in tl.range(0, N_IN, BLOCK_K, num_stages=STAGES):
            a = tl.load(x_tile + start, mask=row, other=0.0)
            next_sums = ()
            for c in tl.static_range(C):
                w_tile = w_tiles[c] + (start + k)[None, :]
                w = tl.load(w_tile, mask=owns[c], other=0.0) if c * 64 + 64 > HEIGHT else tl.load(w_tile)
                next_sums += (tl.dot(w, a, sums[c]),)
            sums = next_sums
        for c in tl.static_range(C):
            total = sums[c]
            if PARTS:
                total *= tl.rsqrt(tl.sum(squares, 0) / N_IN + eps)[None, :]
            if GATED:
                gate, up = tl.split(tl.permute(total.reshape(2, 32, BLOCK_M), (1, 2, 0)))
                total = gate * tl.sigmoid(gate) * up
                i = c * 32 + tl.arange(0, 32)[:, None]
                n = tile * (HEIGHT // 2) + i
                inside = row & (i < HEIGHT // 2) & (n < n_out)
            else:
                n = tile * HEIGHT + c * 64 + tl.arange(0, 64)[:, None]
                inside = row & owns[c] & (n < n_out)
            place = m[None, :] * n_out + n
            if RESIDUAL:
                total += residuals[c].to(tl.float32)
            rounded = total.to(out.dtype.element_ty)
            tl.store(out + place, rounded, mask=inside)
            if SCALES:
                wide = tl.where(inside, rounded.to(tl.float32), 0.0)
                tl.store(scaled + place, (wide * norms[c]).to(scaled.dtype.element_ty), mask=inside)
                of_tile = m * (tl.num_programs(0) * C) + tile * C + c
                tl.store(next_squares + of_tile, tl.sum(wide * wide, 0), mask=m < rows)


class _Tiles(NamedTuple):
    """m: rows; height: rows of weights; k: input features of a step."""

    m: int
    height: int
    k: int
    stages: int


@cache
def _tiles(rows: int, n_in: int, weight_rows: int, gated: bool, multiprocessors: int, room: int) -> _Tiles:
    """As few waves of blocks as their memory allows, all of them about full."""
    m = min(max(triton.next_power_of_2(rows), 16), FIXED_ROWS)
    waves = triton.cdiv(weight_rows, multiprocessors * _HIGHEST)
    unit = 8 if gated else 4
    height = unit * triton.cdiv(weight_rows, unit * multiprocessors * waves)
    for k in (128, 64):
        stage_bytes = 2 * k * (64 * triton.cdiv(height, 64) + m)
        stages = min(room // stage_bytes, 1280 // k)
        if n_in % k == 0 and (stages >= 4 or k == 64):
            break
    if stages < 3:
        return _Tiles(min(m, 32), 64, 64, 4)
    return _Tiles(m, height, k, stages)


def product(
    x: Tensor | Scaled,
    weight: Tensor,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    fixed: bool = False,
    next_norm: Tensor | None = None,
) -> tuple[Tensor, Scaled | None]:
    """`fused.linear`, without a norm before it, and, with next_norm, `fused.scaling_linear`."""
    x_squares, parts = None, 0
    if isinstance(x, Scaled):
        x, x_squares = x
        parts = x_squares.shape[1]
    (rows, n_in), n_out = x.shape, weight.shape[0] // (2 if gated else 1)
    out = x.new_empty((rows, n_out), dtype=dtype) if residual is None else residual
    tiles = _tiles(FIXED_ROWS if fixed else rows, n_in, weight.shape[0], gated, *_device(x.device))
    blocks = triton.cdiv(weight.shape[0], tiles.height)
    scaled = None
    if next_norm is not None:
        squares = torch.empty(
            (rows, blocks * triton.cdiv(tiles.height, 64)), dtype=torch.float32, device=x.device
        )
        scaled = Scaled(torch.empty_like(out), squares)
    if rows:
        _wide_kernel[(blocks, triton.cdiv(rows, tiles.m))](
            x, weight, x_squares, residual, out, next_norm, *(scaled or (None, None)), rows, n_out, parts,
            x.stride(0), eps,
            N_IN=n_in, PARTS=triton.next_power_of_2(parts) if parts else 0, GATED=gated,
            RESIDUAL=residual is not None, SCALES=scaled is not None, BLOCK_M=tiles.m, HEIGHT=tiles.height,
            BLOCK_K=tiles.k, STAGES=tiles.stages, num_warps=4, **jit.launch_options(x.device),
        )  # fmt: skip
    return out, scaled


@cache
def _device(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory of a thread block (the interpreter's are as an H200's)."""
    if device.type != "cuda":
        return 132, _ROOM
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", _ROOM)
