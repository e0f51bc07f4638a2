"""A cost beside the reward: it stays near its limit where it would rise without one, and the multiplier comes back after a stop."""

from __future__ import annotations

import pytest
import torch
from parts import adv_of
from tiny import tiny, whole_and_resumed

from burnish.algorithms.advantages import center
from burnish.algorithms.constraint import PidMultiplier, penalized
from burnish.api import Trainer
from burnish.api.policy_gradient import PolicyGradient
from burnish.monitor.writer import read_metrics

PARTS = """
def sweets(rollout, task):
    return (rollout.text.count("1") + 0.7 * rollout.text.count("2")) / 3

def ones(rollout, task):
    return rollout.text.count("1") / 3
"""
LIMIT = 0.2


@pytest.fixture
def changes(tmp_path):
    """A digit that pays best and costs, and one that pays a little less and costs nothing."""
    (tmp_path / "parts.py").write_text(PARTS)
    part = lambda name, **values: {"fn": f"{tmp_path / 'parts.py'}:{name}", "isolate": False, **values}  # noqa: E731
    return {
        "rewards": [part("sweets"), part("ones", cost=True)], "algo.advantage": "center", "sampling.max_new_tokens": 3,
        "tasks.held_out": 0, "evaluate.every_steps": 0, "checkpoint.every_steps": 100, "train.prompts_per_step": 8,
        "optim.lr": 5e-3, "optim.schedule": "constant", "constraint": {"limit": LIMIT, "kp": 5.0, "ki": 0.2},
    }


def rows_of(folder):
    return [row for row in read_metrics(folder) if row["step"]]


def mean(rows, name):
    return sum(row[name] for row in rows) / len(rows)


def test_the_cost_stays_near_its_limit(tmp_path, changes):
    Trainer(tiny({**changes, "train.steps": 70}), out=tmp_path / "held").run()
    Trainer(tiny({**changes, "train.steps": 40, "constraint": {"limit": 10.0}}), out=tmp_path / "free").run()
    held, free = rows_of(tmp_path / "held"), rows_of(tmp_path / "free")
    assert mean(free[-5:], "rollout/cost_mean") > 0.9 and not any(row["train/constraint_multiplier"] for row in free)
    late = held[25:]
    assert abs(mean(late, "rollout/cost_mean") - LIMIT) < 0.1
    assert mean(late, "rollout/reward_mean") > 0.65         # the free digit pays 0.7
    assert max(row["train/constraint_multiplier"] for row in held[:25]) > 0.5
    first_over = next(i for i, row in enumerate(held) if row["rollout/cost_mean"] > LIMIT)
    assert all(row["train/constraint_multiplier"] == 0 for row in held[: first_over + 1])
    assert held[first_over + 1]["train/constraint_multiplier"] > 0


def test_the_advantages_of_a_step_by_hand(tmp_path, changes, monkeypatch):
    """lambda is that of the costs of earlier steps; it weighs advantages that are made of rewards and of costs alike."""
    batches = []
    of_groups = PolicyGradient.of_groups

    def watched(self, place, groups):
        batch = of_groups(self, place, groups)
        batches.append((batch, groups))
        return batch

    monkeypatch.setattr(PolicyGradient, "of_groups", watched)
    Trainer(tiny({**changes, "train.steps": 6, "constraint": {"limit": 0.01, "kp": 1.0, "ki": 0.5, "kd": 2.0}}), out=tmp_path / "run").run()
    control = PidMultiplier(0.01, 1.0, 0.5, 2.0)
    for row, (batch, groups) in zip(rows_of(tmp_path / "run"), batches, strict=True):
        assert row["train/constraint_multiplier"] == pytest.approx(control.multiplier)
        want = []
        for group in groups:
            reward, cost = (torch.tensor([getattr(s, name) for s in group.scored], dtype=torch.float64) for name in ("reward", "cost"))
            want += penalized(center(reward), center(cost), control.multiplier).tolist()
        assert [adv_of(r) for r in batch.rows] == pytest.approx(want)
        costs = [s.cost for group in groups for s in group.scored]
        assert row["rollout/cost_mean"] == pytest.approx(sum(costs) / len(costs))
        control.update(sum(costs) / len(costs))
    assert control.multiplier > 0.1


def test_stopped_and_resumed_is_the_same_to_the_last_bit(tmp_path, changes):
    short = {**changes, "train.steps": 7, "checkpoint.every_steps": 2, "constraint": {"limit": 0.01, "kp": 1.0, "ki": 0.5, "kd": 2.0}}
    whole, resumed = whole_and_resumed(tmp_path, short, stop_in_step=6)
    assert whole == resumed
    control = whole["state"]["controls"]["constraint"]
    assert control["integral"] > 0 and control["multiplier"] > 0
    assert len({row["train/constraint_multiplier"] for row in whole["metrics"] if row["step"]}) > 4


def test_groups_of_equal_reward_may_differ_in_cost_so_they_are_kept(tmp_path, changes):
    for how in ("drop", "refill"):
        with pytest.raises(ValueError, match=r"constant_groups is .*there is a constraint.*use keep"):
            Trainer(tiny({**changes, "algo.constant_groups": how}), out=tmp_path / how).run()
