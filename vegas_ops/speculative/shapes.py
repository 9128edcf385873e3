"""What a round's code depends on, apart from what its tensors hold: the keys of rounds and their graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vegas_ops.speculative.selection import Policy

RARE = 32  # iterations of a shape that a larger one serves


class Mode(NamedTuple):
    """How a group goes through a verification: its requests had no selection yet; it selects."""

    first: bool
    selects: bool


@dataclass(frozen=True)
class GroupShape:
    """size: requests; rows: of a verification; max_rows: of one request; max_k: width of the lists."""

    policy: Policy
    window: int
    size: int
    rows: int
    max_rows: int
    max_k: int


@dataclass(frozen=True)
class RoundShape:
    """All that a round's code depends on. steps: drafts; max_keys: bound on cached tokens."""

    groups: tuple[GroupShape, ...]
    steps: int
    max_keys: int
    greedy: bool
    filtered: bool

    @property
    def batch(self) -> int:
        return sum(group.size for group in self.groups)

    def serves(self, other: RoundShape) -> bool:
        """Whether a round of this shape can run what the other asks for, on more rows."""

        def fits(a: GroupShape, b: GroupShape) -> bool:
            alike = (a.policy, a.window, a.max_rows) == (b.policy, b.window, b.max_rows)
            return alike and a.size >= b.size and a.max_k >= b.max_k

        alike = (self.steps, self.greedy, self.filtered) == (other.steps, other.greedy, other.filtered)
        return (
            alike
            and self.max_keys >= other.max_keys
            and len(self.groups) == len(other.groups)
            and all(map(fits, self.groups, other.groups))
        )
