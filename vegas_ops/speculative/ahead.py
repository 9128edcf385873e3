"""What the device did ahead of the host, for the requests of the next round: drafts, or plain verifications.

They lie in the round that ran last. A batch whose texts outgrow it, or of which requests left, goes on in
another round, which takes them over: to draft anew costs most of an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vegas_ops.speculative.kv_cache import to_device
from vegas_ops.speculative.request import Request

if TYPE_CHECKING:
    from vegas_ops.speculative.round import Round

Sources = dict[int, int]  # rows of a round, and where that lies which was done ahead for them


def sources(
    r: Round, ahead: Round | None, rows: Sequence[Request | None], num_drafts: dict[Request, int]
) -> Sources | None:
    """Of the requests in the rows of r; None where something must be done anew. A request that is new may
    be among others that draft, as long as it has no drafts."""
    if ahead is None or any(mode.first for mode in r.modes):  # which may need rows of a prompt
        return None
    if (ahead.shape.steps, ahead.shape.greedy) != (r.shape.steps, r.shape.greedy):
        return None
    known = {request: i for i, request in enumerate(ahead.requests) if request is not None}
    found: Sources = {}
    for i, request in enumerate(rows):
        if request is None:
            continue
        place = known.get(request)
        if place is not None and (ahead is not r or place == i):
            found[i] = place
        elif r.shape.steps == 0 or num_drafts[request] > 0:
            return None
    return found


def take_over(r: Round, ahead: Round, found: Sources) -> None:
    """Copies what another round than r did ahead."""
    if not found:
        return
    device, steps = r.cache.device, r.shape.steps
    here, there = to_device([list(found), list(found.values())], torch.int64, device)
    if not steps:
        r.result[here] = ahead.result[there]
        return
    r.table[here, 1 : steps + 1] = ahead.table[there, 1 : steps + 1]
    if not r.shape.greedy:
        r.draft_probs[here] = ahead.draft_probs[there]
