"""Held-out evaluation: every task exactly once, with its own sampling, the same result for any batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from burnish.config import Sampling
from burnish.rollout.run import Visit, run_groups
from burnish.types import Group, Task


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`success` by task id: the share of its scored samples that reached the success reward; None where none was scored."""

    groups: tuple[Group, ...]
    success: dict[str, float | None]

    def metrics(self) -> dict[str, float]:
        scored = [s for g in self.groups for s in g.scored]
        rewards = [s.reward for s in scored if s.reward is not None]
        known = [v for v in self.success.values() if v is not None]
        out: dict[str, float] = {"eval/not_scored_count": len(scored) - len(rewards)}
        if known:
            out["eval/accuracy_frac"] = sum(known) / len(known)
            out["eval/reward_mean"] = sum(rewards) / len(rewards)
        out["eval/sampled_tokens_mean"] = sum(s.rollout.num_sampled for s in scored) / len(scored)
        return out


def evaluate(tasks: Sequence[Task], *, samples_per_task: int, sampling: Sampling, success_reward: float, **parts: Any) -> Evaluation:
    """Sample and score each task; `parts` as in rollout.run_groups. A reward that could not be computed is left out."""
    groups = run_groups(
        [Visit(task) for task in tasks], samples_per_prompt=samples_per_task, sampling=sampling, purpose="evaluate", **parts
    )
    return Evaluation(tuple(groups), success_of(groups, success_reward))


def success_of(groups: Sequence[Group], success_reward: float) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    for group in groups:
        rewards = [s.reward for s in group.scored if s.reward is not None]
        out[group.task.id] = sum(r >= success_reward for r in rewards) / len(rewards) if rewards else None
    return out
