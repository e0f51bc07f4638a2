"""Before and after: two evaluations of the same held-out tasks, with intervals and the paired test between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from burnish.evaluate import measure
from burnish.evaluate.run import success_of
from burnish.types import Group


def compare(before: Sequence[Group], after: Sequence[Group], *, success_reward: float, num_examples: int = 12) -> dict[str, Any]:
    """The evaluation's part of summary.json, as plain data. `before` and `after` hold the same tasks in the same order."""
    was, is_now = success_of(before, success_reward), success_of(after, success_reward)
    out = {"before": _accuracy(was), "after": _accuracy(is_now), "examples": _examples(before, after, num_examples)}
    if any(was[i] is not None and is_now[i] is not None for i in was):
        test = asdict(measure.paired([was[i] for i in was], [is_now[i] for i in was]))
        out["paired"] = {"difference_frac": test.pop("difference"), **test}
    return out


def _accuracy(success: Mapping[str, float | None]) -> dict[str, Any]:
    known = [v for v in success.values() if v is not None]
    if not known:
        return {"num_items": 0}
    i = measure.interval(known)
    return {"accuracy_frac": i.mean, "low": i.low, "high": i.high, "num_items": i.num_items}


def _examples(before: Sequence[Group], after: Sequence[Group], count: int) -> list[dict[str, Any]]:
    """The first sample of some tasks: half of those whose reward changed, half of the rest, in their own order."""
    pairs = [(b.scored[0], a.scored[0]) for b, a in zip(before, after, strict=True)]
    changed = [p for p in pairs if p[0].reward != p[1].reward]
    same = [p for p in pairs if p[0].reward == p[1].reward]
    chosen = changed[: max(count // 2, count - len(same))] + same[: max(count // 2, count - len(changed))]
    return [
        {
            "task_id": old.rollout.task.id, "prompt": next((t.text for t in old.rollout.turns), ""), "answer": old.rollout.task.answer,
            "before": old.rollout.text, "after": new.rollout.text, "before_reward": old.reward, "after_reward": new.reward,
        }
        for old, new in chosen
    ]
