"""The kernels of a decoder layer, on a GPU (or with TRITON_INTERPRET=1 where Triton is installed)."""

from __future__ import annotations

import os

import pytest
import torch

from vegas_ops.models import Qwen3Config, Qwen3Model, fused, wide
from vegas_ops.models.linear import Linear
from vegas_ops.speculative.model import KVTarget

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1"),
]
DTYPE = torch.float16  # the interpreter rounds bf16 otherwise
EPS = 1e-6


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("kind", ["plain", "norm", "gated", "residual", "fp32"])
@pytest.mark.parametrize("rows", [0, 1, 16, 33, 130])
@pytest.mark.parametrize(("n_in", "n_out"), [(128, 96), (384, 50)])
def test_linear(rows, n_in, n_out, kind, fixed):
    x, norm = rand(rows, n_in).to(DTYPE), (1 + 0.1 * rand(n_in, seed=1)).to(DTYPE)
    weight = (rand(2 * n_out if kind == "gated" else n_out, n_in, seed=2) * n_in**-0.5).to(DTYPE)
    residual = rand(rows, n_out, seed=3).to(DTYPE)
    wide = x.double()
    if kind in ("norm", "gated"):
        wide = wide * (wide.pow(2).mean(1, keepdim=True) + EPS).rsqrt() * norm.double()
    expected = wide @ weight.double().t()
    if kind == "gated":
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    options = {
        "norm": {"norm": norm.to(DEVICE), "eps": EPS},
        "gated": {"norm": norm.to(DEVICE), "eps": EPS, "gated": True},
        "residual": {"residual": residual.to(DEVICE, copy=True)},
        "fp32": {"dtype": torch.float32},
    }.get(kind, {})
    if kind == "residual":
        expected = expected + residual.double()
    got = fused.linear(x.to(DEVICE), weight.to(DEVICE), fixed=fixed, **options)
    assert got.dtype == (torch.float32 if kind == "fp32" else DTYPE)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("kind", ["norm", "gated", "residual", "fp32"])
def test_small_tiles_where_a_block_has_little_memory(monkeypatch, kind):
    monkeypatch.setattr(fused, "_roomy", lambda device: False)
    for rows in (16, 130):
        test_linear(rows, 384, 50, kind, False)
    assert not fused.joins(384, 16, torch.device(DEVICE))
    tiles = fused._fitting(fused._tiles(64, 512, 2560, True), torch.device(DEVICE))
    bytes_held = tiles.stages * (tiles.m + 2 * tiles.n) * tiles.k * 2
    assert bytes_held < 99 << 10 and not tiles.held


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("kind", ["plain", "norm", "gated", "residual", "fp32"])
@pytest.mark.parametrize(
    ("multiprocessors", "room", "n_in", "n_out"),
    [(132, 227 << 10, 384, 50), (2, 227 << 10, 320, 150), (1, 227 << 10, 256, 200), (2, 40 << 10, 192, 96)],
)
def test_linear_of_many_features(monkeypatch, multiprocessors, room, n_in, n_out, kind, fixed):
    """Tiles of less than a part, of several, of several waves; little memory."""
    monkeypatch.setattr(fused, "_WIDE", 0)
    monkeypatch.setattr(wide, "_device", lambda device: (multiprocessors, room))
    for rows in (0, 5, 33, 70):
        test_linear(rows, n_in, n_out, kind, fixed)


@pytest.mark.parametrize(("multiprocessors", "room"), [(132, 227 << 10), (108, 163 << 10), (82, 99 << 10)])
def test_tiles_of_a_wide_product(multiprocessors, room):
    """As few waves as tiles of at most 192 rows allow, in each block as many of them; stages that fit."""
    for weight_rows in (6144, 4096, 24576, 19456, 151936, 50):
        for gated in (False, True):
            for rows in (1, 17, 64):
                t = wide._tiles(rows, 4096, weight_rows, gated, multiprocessors, room)
                assert 4096 % t.k == 0 and t.stages >= 3
                height = 64 * -(-t.height // 64)
                assert 2 * t.k * t.stages * (height + t.m) <= room
                if (t.height, t.k, t.stages) == (64, 64, 4) and room < 100 << 10:
                    continue  # of too little memory for equal shares
                assert t.m >= rows
                unit = 8 if gated else 4
                assert t.height % unit == 0 and 0 < t.height <= 192
                waves = -(-weight_rows // (multiprocessors * 192))
                blocks = multiprocessors * waves
                assert blocks * t.height >= weight_rows, "blocks of another wave"
                assert blocks * (t.height - unit) < weight_rows, "higher than equal shares are"


@pytest.mark.parametrize("rows", [0, 1, 16, 33])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("n_in", "n_between", "n_out"), [(256, 384, 50), (320, 256, 96)])
def test_a_norm_between_two_layers(monkeypatch, n_in, n_between, n_out, fixed, rows):
    """Its first half in the layer before it, its second half in the one behind it."""
    monkeypatch.setattr(fused, "_WIDE", 200)
    first, second = (
        (rand(*shape, seed=i) * shape[1] ** -0.5).to(DEVICE, DTYPE)
        for i, shape in enumerate(((n_between, n_in), (2 * n_out, n_between)), 1)
    )
    x, residual = rand(rows, n_in, seed=3).to(DEVICE, DTYPE), rand(rows, n_between, seed=4).to(DEVICE, DTYPE)
    norm = (1 + 0.1 * rand(n_between, seed=5)).to(DEVICE, DTYPE)
    between, scaled = fused.scaling_linear(x, first, residual.clone(), norm, fixed=fixed)
    assert torch.equal(between, fused.linear(x, first, residual=residual.clone(), fixed=fixed))
    exact = residual.double() + x.double() @ first.double().t()
    torch.testing.assert_close(between.double(), exact, rtol=0.01, atol=0.01)
    torch.testing.assert_close(scaled.rows, between * norm, rtol=0.002, atol=1e-4)
    torch.testing.assert_close(scaled.squares.sum(1), between.float().pow(2).sum(1), rtol=1e-5, atol=1e-5)
    for gated in (False, True):
        got = fused.linear(scaled, second, eps=EPS, gated=gated, fixed=fixed)
        expected = fused.linear(between, second, norm=norm, eps=EPS, gated=gated, fixed=fixed)
        torch.testing.assert_close(got, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("least", [fused._WIDE, 0], ids=["small", "wide"])
def test_a_row_does_not_depend_on_the_number_of_rows(monkeypatch, least):
    monkeypatch.setattr(fused, "_WIDE", least)
    x, weight = rand(130, 256).to(DEVICE, DTYPE), rand(128, 256, seed=1).to(DEVICE, DTYPE)
    norm, next_norm = rand(256, seed=2).to(DEVICE, DTYPE), rand(128, seed=3).to(DEVICE, DTYPE)
    residual, after = rand(130, 128, seed=4).to(DEVICE, DTYPE), rand(80, 128, seed=5).to(DEVICE, DTYPE)
    for options in ({}, {"norm": norm, "eps": EPS}, {"norm": norm, "eps": EPS, "gated": True}):
        whole = fused.linear(x, weight, fixed=True, **options)
        for rows in (1, 7, 64, 65):
            assert torch.equal(fused.linear(x[:rows], weight, fixed=True, **options), whole[:rows])
    if least:
        return

    def scaling(rows: int) -> tuple[torch.Tensor, ...]:
        before = residual[:rows].clone()
        out, scaled = fused.scaling_linear(x[:rows], weight, before, next_norm, fixed=True)
        behind = fused.linear(scaled, after, eps=EPS, fixed=True)
        return out, *scaled, behind

    whole = scaling(130)
    for rows in (1, 7, 64, 65):
        assert all(torch.equal(a, b[:rows]) for a, b in zip(scaling(rows), whole, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no library for many rows")
def test_logits_of_many_rows_are_not_rounded():
    x, weight = rand(130, 1344).to(DTYPE), (rand(300, 1344, seed=1) * 1344**-0.5).to(DTYPE)
    assert not fused.serves(130, 1344, logits=True)
    got = Linear(weight.to(DEVICE)).logits(x.to(DEVICE))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu().double(), x.double() @ weight.double().t(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(8, 2, 64), (6, 2, 16), (32, 8, 128)])
def test_rotate(q_heads, kv_heads, dim):
    rows, heads = 5, q_heads + 2 * kv_heads
    qk = q_heads + kv_heads
    qkv, norm = rand(rows, heads, dim).to(DTYPE), 1 + 0.1 * rand(qk, dim, seed=1)
    rope = torch.polar(torch.ones(40, dim // 2), rand(40, dim // 2, seed=2))
    positions = torch.tensor([3, 39, 0, 3, 11])
    wide = qkv[:, :qk].double()
    wide = wide * (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
    expected = torch.view_as_real(pairs * rope[positions][:, None].to(torch.complex128)).flatten(-2)
    arguments = [x.to(DEVICE) for x in (norm, rope, positions)]
    got = qkv.to(DEVICE, copy=True)
    fused.rotate(got, *arguments, EPS)
    torch.testing.assert_close(got[:, :qk].cpu().double(), expected, rtol=0.01, atol=0.01)
    assert torch.equal(got[:, qk:].cpu(), qkv[:, qk:])
    # Into a cache: the same bits, and nothing in other slots.
    k = torch.full((20, kv_heads, dim), 7.0, dtype=DTYPE, device=DEVICE)
    v, slots = k.clone(), torch.tensor([4, 19, 0, 7, 8], device=DEVICE)
    again = qkv.to(DEVICE, copy=True)
    fused.rotate(again, *arguments, EPS, (k, v, slots))
    assert torch.equal(again[:, :q_heads], got[:, :q_heads])
    assert torch.equal(k[slots], got[:, q_heads:qk]) and torch.equal(v[slots], got[:, qk:])
    others = torch.ones(20, dtype=torch.bool, device=DEVICE).index_fill_(0, slots, False)
    assert (k[others] == 7).all() and (v[others] == 7).all()


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 16, 40])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim", "n_in"), [(4, 2, 64, 512), (3, 1, 16, 384)])
def test_rotated_heads(rows, q_heads, kv_heads, dim, n_in, fixed):
    """One kernel in place of two, up to the rounding between them; the same bits for any number of rows."""
    heads, qk = q_heads + 2 * kv_heads, q_heads + kv_heads
    x = rand(rows, n_in).to(DEVICE, DTYPE)
    weight = (rand(heads * dim, n_in, seed=1) * n_in**-0.5).to(DEVICE, DTYPE)
    norm = (1 + 0.1 * rand(n_in, seed=2)).to(DEVICE, DTYPE)
    assert fused.joins(n_in, dim, norm.device) and not fused.joins(4096, 128, norm.device)
    head_norm = (1 + 0.1 * rand(qk, dim, seed=3)).to(DEVICE)
    rope = torch.polar(torch.ones(90, dim // 2), rand(90, dim // 2, seed=4)).to(DEVICE)
    positions = torch.arange(rows, device=DEVICE) * 2
    k, v = (torch.full((50, kv_heads, dim), 7.0, dtype=DTYPE, device=DEVICE) for _ in range(2))
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(5))[:rows].to(DEVICE)
    expected = fused.linear(x, weight, norm=norm, eps=EPS, fixed=fixed).view(rows, heads, dim)
    value = expected[:, qk:].clone()
    fused.rotate(expected, head_norm, rope, positions, EPS)

    def run(n: int) -> torch.Tensor:
        target = KVTarget(k, v, slots[:n])
        return fused.rotated_heads(
            x[:n], weight, norm, head_norm, rope, positions[:n], EPS, target, fixed=fixed
        )

    q = run(rows)
    near = {"rtol": 0.01, "atol": 0.01}
    torch.testing.assert_close(q, expected[:, :q_heads], **near)
    torch.testing.assert_close(k[slots], expected[:, q_heads:qk], **near)
    torch.testing.assert_close(v[slots], value, **near)
    others = torch.ones(50, dtype=torch.bool, device=DEVICE).index_fill_(0, slots, False)
    assert (k[others] == 7).all() and (v[others] == 7).all()
    if fixed:
        assert torch.equal(run(min(rows, 7)), q[:7])


CONFIG = Qwen3Config(
    vocab_size=300, hidden_size=256, intermediate_size=384, num_layers=2, num_heads_q=4, num_heads_kv=2,
    head_dim=64, max_position=256,
)  # fmt: skip


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("wide", [fused._WIDE, 100], ids=["norms inside", "norms between"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_model_with_and_without_the_kernels(monkeypatch, batch_invariant, wide):
    """Logits agree within bf16's rounding; batch-invariant ones do not depend on the number of rows."""
    monkeypatch.setattr(fused, "_WIDE", wide)
    model = Qwen3Model.random(CONFIG, dtype=torch.bfloat16, device="cuda", batch_invariant=batch_invariant)
    assert model.batch_invariant or not batch_invariant
    ids = torch.arange(40, device="cuda")

    def logits(rows: int = 40) -> torch.Tensor:
        def attend(layer, q, k, v):
            return q + k.repeat_interleave(2, 1) + v.repeat_interleave(2, 1)

        return model.compute_logits(model.forward(ids[:rows], ids[:rows] * 3, attend))

    fast = logits()
    if batch_invariant:
        assert torch.equal(logits(7), fast[:7]) and torch.equal(logits(1), fast[:1])
    monkeypatch.setattr(fused, "available", lambda x: False)
    slow = logits()
    assert (fast - slow).abs().max() < 0.05 * slow.std()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_layers_that_do_not_fit_go_through_torch():
    weight = rand(40, 100).to("cuda", torch.bfloat16)
    x = rand(3, 100, seed=1).to("cuda", torch.bfloat16)
    torch.testing.assert_close(Linear(weight)(x), torch.nn.functional.linear(x, weight))
    wide = rand(40, 128).to("cuda", torch.bfloat16)
    bias, x = rand(40, seed=2).to("cuda", torch.bfloat16), rand(3, 128, seed=1).to("cuda", torch.bfloat16)
    torch.testing.assert_close(Linear(wide, bias)(x), torch.nn.functional.linear(x, wide, bias))


@pytest.mark.parametrize("features", [50, 2100])
def test_gate(monkeypatch, features):
    x = rand(5, 2 * features).to(DEVICE, DTYPE)
    first, second = x.double().chunk(2, 1)
    expected = torch.nn.functional.silu(first) * second
    by_torch = fused.gate(x)
    monkeypatch.setattr(fused, "available", lambda x: True)
    for got in (by_torch, fused.gate(x)):
        torch.testing.assert_close(got.double(), expected, rtol=3e-3, atol=1e-3)


@pytest.mark.parametrize("features", [128, 384, 2560])
def test_rms_norm(features):
    x, norm = rand(7, features).to(DTYPE), (1 + 0.1 * rand(features, seed=1)).to(DTYPE)
    wide = x.double()
    expected = wide * (wide.pow(2).mean(1, keepdim=True) + EPS).rsqrt() * norm.double()
    got = fused._rms_norm(x.to(DEVICE), norm.to(DEVICE), EPS)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=2e-3, atol=1e-3)
