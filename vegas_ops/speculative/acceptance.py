"""Which drafts stay: lossless acceptance, vectorised over the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vegas_ops.arguments import check_kind
from vegas_ops.speculative.sampling import draw


class Accepted(NamedTuple):
    """num_accepted: (batch,) drafts. tokens: (batch, max_drafts + 1) the accepted drafts, then
    one token of the target, then -1. failed: (batch,) bool, the target row after the last accepted
    draft has no distribution (NaN); the token that it should have given is -1."""

    num_accepted: Tensor
    tokens: Tensor
    failed: Tensor


def accept_greedy(drafts: Tensor, num_drafts: Tensor, target_logits: Tensor) -> Accepted:
    """Keeps the longest prefix of drafts that greedy decoding would have emitted.

    drafts: (batch, max_drafts) int64; num_drafts: (batch,), entries beyond it are ignored;
    target_logits: (batch, max_drafts + 1, vocab_size): row i follows the i-th draft (row 0 the last
    committed token), so it judges draft i and row num_drafts gives the bonus token.
    """
    _check_dims(drafts=(drafts, 2), num_drafts=(num_drafts, 1), target_logits=(target_logits, 3))
    top, token = target_logits.max(-1)
    valid = top.abs() < torch.inf
    # NaN has an argmax, and a draft from NaN has the same one.
    count = _leading((drafts == token[:, :-1]) & valid[:, :-1], num_drafts)
    emitted = token.gather(1, count[:, None])[:, 0]
    failed = ~valid.gather(1, count[:, None])[:, 0]
    return _emit(drafts, count, emitted, failed)


def accept_sampled(
    drafts: Tensor,
    num_drafts: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    u_accept: Tensor,
    u_emit: Tensor,
) -> Accepted:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): the output has exactly the
    target's distribution.

    draft_probs: (batch, max_drafts, vocab_size), the distribution that each draft was drawn from,
    after every filter, one-hot for a draft that was not drawn; target_probs: (batch,
    max_drafts + 1, vocab_size), processed likewise, rows as in `accept_greedy`; u_accept: (batch,
    max_drafts) and u_emit: (batch,), independent of each other and of the draws of the drafts.
    """
    _check_dims(
        drafts=(drafts, 2), num_drafts=(num_drafts, 1), draft_probs=(draft_probs, 3),
        target_probs=(target_probs, 3), u_accept=(u_accept, 2), u_emit=(u_emit, 1),
    )  # fmt: skip
    p = target_probs[:, :-1].gather(2, drafts[..., None])[..., 0].double()
    q = draft_probs.gather(2, drafts[..., None])[..., 0].double()
    count = _leading(u_accept * q < p, num_drafts)
    row = count[:, None, None].expand(-1, 1, target_probs.shape[-1])
    target = target_probs.gather(1, row)[:, 0]
    if drafts.shape[1]:
        q_row = draft_probs.gather(1, row.clamp_max(drafts.shape[1] - 1))[:, 0]
        rejected = (count < num_drafts)[:, None]
        residual = (target - q_row.masked_fill(~rejected, 0.0)).clamp_min(0.0)
        # Empty only if p and q are equal up to rounding: then p itself is the residual.
        target = torch.where(residual.sum(-1, keepdim=True) == 0, target, residual)
    failed = target.isnan().any(-1)
    return _emit(drafts, count, draw(target, u_emit), failed)


def _check_dims(**arguments: tuple[Tensor, int]) -> None:
    for name, (value, dims) in arguments.items():
        check_kind(name, value, Tensor, "a tensor")
        if value.dim() != dims:
            raise ValueError(f"`{name}` must have {dims} dimensions, got {value.dim()}")


def _leading(good: Tensor, num_drafts: Tensor) -> Tensor:
    """Length of the leading run of true entries among the first num_drafts."""
    column = torch.arange(good.shape[1], device=good.device)
    good = good & (column < num_drafts[:, None])
    return good.long().cumprod(1).sum(1)


def _emit(drafts: Tensor, count: Tensor, emitted: Tensor, failed: Tensor) -> Accepted:
    column = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    emitted = emitted.masked_fill(failed, -1)[:, None]
    tokens = torch.where(column == count[:, None], emitted, pad(drafts, (0, 1)))
    return Accepted(count, tokens.masked_fill(column > count[:, None], -1), failed)
