"""Sampled drafting and acceptance as one kernel each on a GPU.

Filters need no order: a token stays if it lies before a threshold, and the threshold is found by halving the
range of its bits. `sampling.py` and `acceptance.py` say what these kernels compute and are what runs
everywhere else, and the tests' oracle; sums are taken in another order.
"""

# mypy: disable-error-code="no-untyped-def, var-annotated, assignment"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vegas_ops import jit
from vegas_ops.jit import gdc_launch_dependents, gdc_wait
from vegas_ops.speculative.sampling import ACCEPT, DRAFT, EMIT

if TYPE_CHECKING:
    from vegas_ops.speculative.round import Round

try:
    import triton
    import triton.language as tl

    from vegas_ops.speculative.bookkeeping import best_of
except ImportError:  # a torch without a GPU
    triton = None

_BLOCK = 8192  # tokens that a thread block looks at together

if triton is not None:
    _INF = tl.constexpr(0x7F800000)  # bits of fp32 infinity
    _MANY = tl.constexpr(0x40000000)  # more than a vocabulary has tokens

    @triton.jit
    def _mix(x):
        """`sampling._mix` of uint64."""
        x = x + 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        return x ^ (x >> 31)

    @triton.jit
    def _uniform(seed, round, index, STREAM: tl.constexpr):
        """`sampling.uniform`; int64, any shape."""
        h = _mix(seed.to(tl.uint64))
        h = _mix(h ^ _mix((round + 0x632BE5AB).to(tl.uint64)))
        h = _mix(h ^ _mix((index * 4 + (STREAM + 0x1F123BB5)).to(tl.uint64)))
        return (h >> 11).to(tl.float64) * (2.0**-53)

    @triton.jit
    def _distances(row, start, top, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
        """How far logits lie below the best, over the temperature, and the bits of that: integers in the
        same order, larger than infinity's beyond the vocabulary."""
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < VOCAB, other=0.0).to(tl.float32)
        y = tl.div_rn(top - x, temperature)
        return y, tl.where(i < VOCAB, y.to(tl.int32, bitcast=True), _INF + 1)

    @triton.jit
    def _up_to(
        row, top, temperature, first_bits, first_weights, limit, VOCAB: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        """Number and weight of the tokens whose bits are at most `limit`; first_*: of the first of them."""
        count = (first_bits <= limit).to(tl.int32)
        mass = tl.where(first_bits <= limit, first_weights, 0.0)
        for start in range(BLOCK, VOCAB, BLOCK):
            y, bits = _distances(row, start, top, temperature, VOCAB, BLOCK)
            count += (bits <= limit).to(tl.int32)
            mass += tl.where(bits <= limit, tl.exp(-y), 0.0)
        return tl.sum(count, 0), tl.sum(mass, 0)

    @triton.jit
    def _threshold(row, top, temperature, top_k, top_p, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
        """(bits, ties): tokens of less bits pass top-k and top-p, and the first `ties` of as many."""
        limit, ties = tl.full((), _INF, tl.int32), tl.full((), _MANY, tl.int32)
        y, bits = _distances(row, 0, top, temperature, VOCAB, BLOCK)
        weights = tl.exp(-y)
        _count, whole = _up_to(row, top, temperature, bits, weights, limit, VOCAB, BLOCK)
        if top_k > 0:
            low, high = tl.full((), 0, tl.int32), tl.full((), _INF, tl.int32)
            while low < high:
                middle = low + (high - low) // 2
                count, mass = _up_to(row, top, temperature, bits, weights, middle, VOCAB, BLOCK)
                enough = count >= top_k
                high = tl.where(enough, middle, high)
                low = tl.where(enough, low, middle + 1)
            limit = low
            count, mass = _up_to(row, top, temperature, bits, weights, limit - 1, VOCAB, BLOCK)
            equal, _mass = _up_to(row, top, temperature, bits, weights, limit, VOCAB, BLOCK)
            ties = tl.minimum(top_k - count, equal - count).to(tl.int32)
            whole = mass + ties * tl.exp(-limit.to(tl.float32, bitcast=True))
        if top_p < 1:
            wanted = top_p * whole
            low, high = tl.full((), 0, tl.int32), limit
            while low < high:
                middle = low + (high - low) // 2
                count, mass = _up_to(row, top, temperature, bits, weights, middle, VOCAB, BLOCK)
                enough = mass >= wanted
                high = tl.where(enough, middle, high)
                low = tl.where(enough, low, middle + 1)
            count, mass = _up_to(row, top, temperature, bits, weights, low - 1, VOCAB, BLOCK)
            each = tl.exp(-low.to(tl.float32, bitcast=True))
            # Where each is next to nothing, any number of them is.
            more = tl.minimum((wanted - mass) / tl.maximum(each, 1e-38), 1e9)
            here = tl.maximum(tl.ceil(more).to(tl.int32), 1)
            ties = tl.where(low == limit, tl.minimum(ties, here), here)
            limit = low
        return limit, ties

    @triton.jit
    def _kept(
        row, start, top, temperature, limit, ties, min_p, seen,
        FILTERED: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Weights of the tokens from `start` on that the filters leave; seen: ties before them, then with
        them."""
        y, bits = _distances(row, start, top, temperature, VOCAB, BLOCK)
        weight = tl.where(bits <= _INF, tl.exp(-y), 0.0)
        if FILTERED:
            tie = (bits == limit).to(tl.int32)
            before = seen + tl.cumsum(tie, 0) - tie
            kept = (bits < limit) | ((tie > 0) & (before < ties))
            weight = tl.where(kept & (weight >= min_p), weight, 0.0)
            seen += tl.sum(tie, 0)
        return weight, seen

    @triton.jit
    def _distribution(
        row, top, temperature, top_k, top_p, min_p,
        FILTERED: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """(bits, ties, weight of all tokens that the filters leave)."""
        limit, ties = tl.full((), _INF, tl.int32), tl.full((), _MANY, tl.int32)
        if FILTERED:
            limit, ties = _threshold(row, top, temperature, top_k, top_p, VOCAB, BLOCK)
        seen, whole = tl.full((), 0, tl.int32), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            weight, seen = _kept(
                row, start, top, temperature, limit, ties, min_p, seen, FILTERED, VOCAB, BLOCK
            )
            whole += weight
        return limit, ties, tl.sum(whole, 0)

    @triton.jit
    def _hit(sums, weight, i, total, u):
        """The first token with a weight whose running sum lies beyond u of all; VOCAB and more if none."""
        # Strictly below the total: then some token's interval contains it.
        target = tl.minimum(u * total, total - total * (2.0**-52))
        return tl.min(tl.where((sums > target) & (weight > 0), i, _MANY), 0)

    @triton.jit(do_not_specialize=["step"])
    def _draft_kernel(
        logits, values, table, tokens, probs, temperatures, top_ks, top_ps, min_ps, batch, width, steps, step,
        DRAFTS: tl.constexpr, SEEDS: tl.constexpr, LENGTHS: tl.constexpr, STREAM: tl.constexpr,
        FILTERED: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """One request's draft: its distribution, and a token of it."""
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        request, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        row, out = logits + request * VOCAB, probs + (request * steps + step) * VOCAB
        temperature = tl.load(temperatures + request)
        top, token, odd = best_of(row, VOCAB, BLOCK)
        valid = (tl.abs(top) < float("inf")) & ~odd
        if valid & (temperature > 0):
            top_k, top_p = tl.load(top_ks + request), tl.load(top_ps + request)
            min_p = tl.load(min_ps + request)
            limit, ties, whole = _distribution(
                row, top, temperature, top_k, top_p, min_p, FILTERED, VOCAB, BLOCK
            )
            seen, base = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)
            total = tl.full((), 0.0, tl.float64)
            for start in range(0, VOCAB, BLOCK):
                weight, seen = _kept(
                    row, start, top, temperature, limit, ties, min_p, seen, FILTERED, VOCAB, BLOCK
                )
                p = tl.div_rn(weight, whole)
                tl.store(out + start + i, p, mask=start + i < VOCAB)
                sums = base + tl.cumsum(p.to(tl.float64), 0)
                total = tl.maximum(total, tl.max(tl.where(p > 0, sums, 0.0), 0))
                base = tl.maximum(base, tl.max(sums, 0))
            seed = tl.load(values + SEEDS * batch + request)
            length = tl.load(values + LENGTHS * batch + request)
            u = _uniform(seed, length, step.to(tl.int64), STREAM)
            seen, base = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)
            found = tl.full((), _MANY, tl.int32)
            for start in range(0, VOCAB, BLOCK):
                weight, seen = _kept(
                    row, start, top, temperature, limit, ties, min_p, seen, FILTERED, VOCAB, BLOCK
                )
                p = tl.div_rn(weight, whole)
                sums = base + tl.cumsum(p.to(tl.float64), 0)
                found = tl.minimum(found, _hit(sums, p, start + i, total, u))
                base = tl.maximum(base, tl.max(sums, 0))
            token = tl.minimum(found, VOCAB - 1)
        else:
            # A row without a distribution drafts token 0, and says so: the target decides.
            token = tl.where(valid, token, 0)
            for start in range(0, VOCAB, BLOCK):
                tl.store(out + start + i, (start + i == token).to(tl.float32), mask=start + i < VOCAB)
        tl.store(tokens + request, token.to(tl.int64))
        active = step < tl.load(values + DRAFTS * batch + request)
        # A prompt's last tokens stay.
        tl.store(table + request * width + step + 1, token.to(tl.int64), mask=active)

    @triton.jit
    def _target_kernel(
        logits, values, last, probs, temperatures, top_ks, top_ps, min_ps, batch,
        DRAFTS: tl.constexpr, COLUMNS: tl.constexpr, FILTERED: tl.constexpr, VOCAB: tl.constexpr,
        BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """The target's distribution for one draft of one request, or behind them; NaN where it has none."""
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        request, column, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
        drafts = tl.load(values + DRAFTS * batch + request)
        if column <= drafts:
            place = tl.maximum(tl.load(last + request) - drafts + column, 0)
            row, out = logits + place * VOCAB, probs + (request * COLUMNS + column) * VOCAB
            temperature = tl.load(temperatures + request)
            top, token, odd = best_of(row, VOCAB, BLOCK)
            valid = (tl.abs(top) < float("inf")) & ~odd
            if valid & (temperature > 0):
                top_k, top_p = tl.load(top_ks + request), tl.load(top_ps + request)
                min_p = tl.load(min_ps + request)
                limit, ties, whole = _distribution(
                    row, top, temperature, top_k, top_p, min_p, FILTERED, VOCAB, BLOCK
                )
                seen = tl.full((), 0, tl.int32)
                for start in range(0, VOCAB, BLOCK):
                    weight, seen = _kept(
                        row, start, top, temperature, limit, ties, min_p, seen, FILTERED, VOCAB, BLOCK
                    )
                    tl.store(out + start + i, tl.div_rn(weight, whole), mask=start + i < VOCAB)
            else:
                for start in range(0, VOCAB, BLOCK):
                    hot = (start + i == token).to(tl.float32)
                    p = tl.where(valid, hot, float("nan"))
                    tl.store(out + start + i, p, mask=start + i < VOCAB)

    @triton.jit
    def _residual(target, draft, start, rejected, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
        """Of the tokens from `start` on: the target's distribution, and what a rejected draft leaves."""
        i = start + tl.arange(0, BLOCK)
        p = tl.load(target + i, mask=i < VOCAB, other=0.0)
        q = tl.load(draft + i, mask=(i < VOCAB) & rejected, other=0.0)
        return p, tl.maximum(p - q, 0.0)

    @triton.jit
    def _accept_kernel(
        values, table, target_probs, draft_probs, result, batch, steps, width,
        DRAFTS: tl.constexpr, SEEDS: tl.constexpr, LENGTHS: tl.constexpr, COLUMNS: tl.constexpr,
        ACCEPTS: tl.constexpr, EMITS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """`accept_sampled` for one request."""
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        request, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        column = tl.arange(0, COLUMNS)
        drafts = tl.load(values + DRAFTS * batch + request)
        seed = tl.load(values + SEEDS * batch + request)
        length = tl.load(values + LENGTHS * batch + request)
        known = column < drafts
        draft = tl.load(table + request * width + 1 + column, mask=column < steps, other=0)
        targets, drafted = target_probs + request * (steps + 1) * VOCAB, draft_probs + request * steps * VOCAB
        p = tl.load(targets + column * VOCAB + draft, mask=known, other=0.0).to(tl.float64)
        q = tl.load(drafted + column * VOCAB + draft, mask=known, other=0.0).to(tl.float64)
        good = known & (_uniform(seed, length, column.to(tl.int64), ACCEPTS) * q < p)
        count = tl.min(tl.where(good, COLUMNS, column), 0)
        rejected = count < drafts
        targets += count * VOCAB
        drafted += count * VOCAB
        odd, left = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            here, rest = _residual(targets, drafted, start, rejected, VOCAB, BLOCK)
            odd |= (here != here).to(tl.int32)
            left = tl.maximum(left, rest)
        # Empty only if both are equal up to rounding: then the target itself is the residual.
        rejected = rejected & (tl.max(left, 0) > 0)
        base, total = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
        for start in range(0, VOCAB, BLOCK):
            here, rest = _residual(targets, drafted, start, rejected, VOCAB, BLOCK)
            sums = base + tl.cumsum(rest.to(tl.float64), 0)
            total = tl.maximum(total, tl.max(tl.where(rest > 0, sums, 0.0), 0))
            base = tl.maximum(base, tl.max(sums, 0))
        u = _uniform(seed, length, tl.full((), 0, tl.int64), EMITS)
        base, found = tl.full((), 0.0, tl.float64), tl.full((), _MANY, tl.int32)
        for start in range(0, VOCAB, BLOCK):
            here, rest = _residual(targets, drafted, start, rejected, VOCAB, BLOCK)
            sums = base + tl.cumsum(rest.to(tl.float64), 0)
            found = tl.minimum(found, _hit(sums, rest, start + i, total, u))
            base = tl.maximum(base, tl.max(sums, 0))
        failed = tl.max(odd, 0) > 0
        emitted = tl.where(failed, -1, tl.minimum(found, VOCAB - 1)).to(tl.int64)
        line = result + request * (steps + 3)
        tl.store(line, count.to(tl.int64))
        tl.store(line + 1, failed.to(tl.int64))
        token = tl.where(column < count, draft, tl.where(column == count, emitted, -1))
        tl.store(line + 2 + column, token, mask=column <= steps)


def draft(round: Round, logits: Tensor, tokens: Tensor, step: int, fields: dict[str, int]) -> None:
    """A sampled draft step: the distributions of logits (batch, vocab_size) fp32 into the round's, a token of
    each into tokens, (batch,) int64, and into the table of the requests that draft it."""
    batch, vocab = logits.shape
    _draft_kernel[(batch,)](
        logits, round.values, round.table, tokens, round.draft_probs, *_parameters(round), batch,
        round.table.shape[1], round.shape.steps, step,
        DRAFTS=fields["num_drafts"], SEEDS=fields["seeds"], LENGTHS=fields["lengths"], STREAM=DRAFT,
        FILTERED=round.sampling.filtered, **_tiles(vocab, logits.device),
    )  # fmt: skip


def accept(round: Round, logits: Tensor, fields: dict[str, int]) -> None:
    """Acceptance by sampling of the packed rows' logits, (rows, vocab_size) fp32, into `round.result`."""
    (batch, width), steps, vocab = round.table.shape, round.shape.steps, logits.shape[1]
    probs = torch.empty((batch, steps + 1, vocab), device=logits.device)
    _target_kernel[(batch, steps + 1)](
        logits, round.values, round.rows.last, probs, *_parameters(round), batch,
        DRAFTS=fields["num_drafts"], COLUMNS=steps + 1, FILTERED=round.sampling.filtered,
        **_tiles(vocab, logits.device),
    )  # fmt: skip
    _accept_kernel[(batch,)](
        round.values, round.table, probs, round.draft_probs, round.result, batch, steps, width,
        DRAFTS=fields["num_drafts"], SEEDS=fields["seeds"], LENGTHS=fields["lengths"],
        COLUMNS=triton.next_power_of_2(steps + 1), ACCEPTS=ACCEPT, EMITS=EMIT, **_tiles(vocab, logits.device),
    )  # fmt: skip


def _parameters(round: Round) -> tuple[Tensor, ...]:
    sampling = round.sampling
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def _tiles(vocab: int, device: torch.device) -> dict[str, Any]:
    return {
        "VOCAB": vocab,
        "BLOCK": min(triton.next_power_of_2(vocab), _BLOCK),
        "num_warps": 16 if vocab > 2048 else 4,
        **jit.launch_options(device),
    }
