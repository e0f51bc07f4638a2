"""What is trained on and what is dropped, each drop by a named rule and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from burnish.types import Group


@dataclass(frozen=True, slots=True)
class Kept:
    """Groups for the update, and how many rollouts were dropped by which rule."""

    groups: tuple[Group, ...]
    dropped: Mapping[str, int]


def keep(groups: Sequence[Group], *, constant_groups: str = "keep", needs_reward: bool = True) -> Kept:
    """Rules: not_scored (the reward is None; without needs_reward only where the episode failed), no_tokens (the policy wrote nothing),
    constant_group (all rewards of the group are equal; only with constant_groups "drop" or "refill"). Everything else stays, in order.
    """
    dropped: Counter[str] = Counter()
    kept = []
    for group in groups:
        scored = []
        for item in group.scored:
            if item.reward is None and (needs_reward or item.rollout.stop.startswith("error:")):
                dropped["not_scored"] += 1
            elif not item.rollout.num_sampled:
                dropped["no_tokens"] += 1
            else:
                scored.append(item)
        if constant_groups != "keep" and is_constant([s.reward for s in scored]):
            dropped["constant_group"] += len(scored)
        elif scored:
            kept.append(Group(group.task, tuple(scored)))
    return Kept(tuple(kept), dict(dropped))


def keep_best(groups: Sequence[Group], *, best_of: int, min_reward: float | None = None) -> Kept:
    """Of each group the `best_of` samples of highest reward, of equal ones those that were sampled first; none below min_reward.

    Rules: those of `keep`, below_min_reward, and not_best.
    """
    known = keep(groups)
    dropped = Counter(known.dropped)
    kept = []
    for group in known.groups:
        good = [item for item in group.scored if min_reward is None or item.reward >= min_reward]
        best = sorted(range(len(good)), key=lambda i: (-good[i].reward, i))[:best_of]
        dropped["below_min_reward"] += len(group.scored) - len(good)
        dropped["not_best"] += len(good) - len(best)
        if best:
            kept.append(Group(group.task, tuple(good[i] for i in sorted(best))))
    return Kept(tuple(kept), dict(+dropped))


def is_constant(rewards: Sequence[float]) -> bool:
    """No two samples differ, so a group baseline gives every one of them the advantage 0."""
    return len(rewards) < 2 or max(rewards) == min(rewards)
