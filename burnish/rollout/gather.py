"""The rollouts of one step, with more tasks where too few groups teach something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from burnish.rollout.keep import Kept
from burnish.rollout.run import Visit
from burnish.types import Group


@dataclass(frozen=True, slots=True)
class Gathered:
    """All groups of a step, what was kept of them, and how many more rounds it took."""

    groups: tuple[Group, ...]
    kept: Kept
    refills: int = 0


def gather(
    num_groups: int, *, next_visits: Callable[[int], list[Visit]], roll: Callable[[list[Visit]], list[Group]],
    keep: Callable[[Sequence[Group]], Kept], refill_rounds: int = 0,
) -> Gathered:
    """Visit `num_groups` tasks; while fewer groups are kept, as many more tasks as are missing, at most `refill_rounds` times.

    Dynamic sampling of DAPO (arXiv:2503.14476 section 3.2), bounded.
    """
    groups = roll(next_visits(num_groups))
    kept = keep(groups)
    refills = 0
    while len(kept.groups) < num_groups and refills < refill_rounds:
        more = roll(next_visits(num_groups - len(kept.groups)))
        also = keep(more)
        groups = [*groups, *more]
        kept = Kept((*kept.groups, *also.groups), dict(Counter(kept.dropped) + Counter(also.dropped)))
        refills += 1
    return Gathered(tuple(groups), kept, refills)
