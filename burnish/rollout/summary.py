"""What a step's rollouts look like in numbers."""

from __future__ import annotations

from collections.abc import Sequence

from burnish.rollout.keep import Kept, is_constant
from burnish.types import Group


def summarize(groups: Sequence[Group], kept: Kept, *, success_reward: float) -> dict[str, float]:
    """Metrics of all rollouts of a step, before anything was dropped, with rewards as they were given, before any normalisation.
    A metric nothing can be said about is absent.
    """
    scored = [s for g in groups for s in g.scored]
    rollouts = [s.rollout for s in scored]
    rewards = [s.reward if s.given is None else s.given for s in scored if s.reward is not None]
    rated = [[s.reward for s in g.scored if s.reward is not None] for g in groups]
    rated = [r for r in rated if len(r) > 1]
    metrics: dict[str, float] = {
        "rollout/not_scored_count": len(scored) - len(rewards),
        "rollout/dropped_rollouts_count": sum(kept.dropped.values()),
        **_mean("rollout/reward_mean", rewards),
        **_mean("rollout/success_frac", [r >= success_reward for r in rewards]),
        **_mean("rollout/sampled_tokens_mean", [r.num_sampled for r in rollouts]),
        **_mean("rollout/truncated_frac", [r.truncated for r in rollouts]),
        **_mean("rollout/constant_groups_frac", [is_constant(r) for r in rated]),
    }
    for name in sorted({n for s in scored for n in s.scores}):
        metrics |= _mean(f"rollout/score_{name}_mean", [s.scores[name] for s in scored if s.scores.get(name) is not None])
    return metrics


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: sum(values) / len(values)} if values else {}
