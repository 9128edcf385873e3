"""How many drafts a round should make, by how many were accepted so far.

A batch makes its draft steps together, so it is one number for all: the one that gives most expected
tokens for the time of a round, 1 + gamma * draft_cost verifications.
"""

from __future__ import annotations

from collections.abc import Sequence

from vegas_ops.speculative.request import Request

MEMORY = 0.9  # weight of what is known, at every draft that is judged
_GAIN = 1.02  # another number takes other graphs and discards drafts made ahead: not for less


def update_rate(rate: float, drafted: int, accepted: int) -> float:
    """The running probability that a draft is accepted if those before it were."""
    judged = min(accepted + 1, drafted)
    if judged == 0:
        return rate
    kept = MEMORY**judged
    return kept * rate + (1 - kept) * accepted / judged


def expected_tokens(rate: float, gamma: int) -> float:
    """Of a round of `gamma` drafts, each accepted with probability `rate` if those before it were."""
    return gamma + 1 if rate >= 1 else (1 - rate ** (gamma + 1)) / (1 - rate)


def best_gamma(requests: Sequence[Request], draft_cost: float, current: int) -> int:
    """Drafts of the next rounds: the current number, unless another is clearly better."""
    gammas = range(1, max(request.gamma for request in requests) + 1)

    def speed(gamma: int) -> float:
        tokens = sum(expected_tokens(q.draft_rate, min(gamma, q.gamma)) for q in requests)
        return tokens / (1 + gamma * draft_cost)

    best = max(gammas, key=speed)
    return current if current in gammas and speed(best) < _GAIN * speed(current) else best
