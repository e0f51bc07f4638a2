"""T22: what a step is made of. Refills are bounded and counted, each prompt comes once an epoch, constant groups are never trained on."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from parts import adv_of
from pyarrow import parquet
from tiny import tiny

from burnish.algorithms.advantages import center, standardize
from burnish.algorithms.returns import soft_overlong
from burnish.api import Trainer
from burnish.api.policy_gradient import PolicyGradient
from burnish.api.sync import Sync
from burnish.data.tasks import Cursor
from burnish.monitor.writer import read_metrics
from burnish.rollout import Visit, assemble, gather, keep
from burnish.types import Group, Rollout, Scored, Task

TASKS = [Task(f"t{i}", str(i)) for i in range(10)]


def scored(task, reward, sample, *, length=2, stop="end_token"):
    tokens = (1, *range(2, 2 + length))
    sampled = (False, *(True,) * length)
    return Scored(Rollout(task, sample, tokens, sampled, tuple(-1.0 * s for s in sampled), (), stop, 0), reward, {})


def group(task, rewards, **values):
    return Group(task, tuple(scored(task, reward, i, **values) for i, reward in enumerate(rewards)))


class World:
    """Tasks by a cursor; `rewards_of(task)` says what its samples earn."""

    def __init__(self, rewards_of, *, tasks=TASKS):
        self.cursor, self.rewards_of = Cursor(tasks, seed=0, shuffle=True), rewards_of
        self.asked, self.seen = [], []

    def next_visits(self, n):
        self.asked.append(n)
        visits = [Visit(task, self.cursor.epoch) for task in self.cursor.next(n)]
        self.seen += [visit.task.id for visit in visits]
        return visits

    def roll(self, visits):
        return [group(visit.task, self.rewards_of(visit.task)) for visit in visits]

    def gather(self, num, rounds, how="refill"):
        self.asked = []
        return gather(num, next_visits=self.next_visits, roll=self.roll, keep=partial(keep, constant_groups=how), refill_rounds=rounds)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_refills_are_bounded(rounds):
    world = World(lambda task: [1.0, 1.0])
    got = world.gather(4, rounds)
    assert world.asked == [4] * (1 + rounds)
    assert (got.refills, got.kept.groups, len(got.groups)) == (rounds, (), 4 * (1 + rounds))
    assert got.kept.dropped == {"constant_group": 2 * 4 * (1 + rounds)}


def test_only_what_is_missing_is_drawn_and_no_more_than_needed():
    flat = iter([True, False, True, False, False, True, False, False])
    world = World(lambda task: [1.0, 1.0 if next(flat) else 0.0])
    got = world.gather(4, 5)
    # 4 tasks, 2 of them flat; 2 more, 1 of them flat; 1 more
    assert world.asked == [4, 2, 1] and got.refills == 2
    assert [g.task.id for g in got.kept.groups] == [world.seen[i] for i in (1, 3, 4, 6)]
    assert [g.task.id for g in got.groups] == world.seen and got.kept.dropped == {"constant_group": 6}


def test_a_group_that_could_not_be_scored_is_drawn_anew_too():
    bad = iter([True, False, False])
    world = World(lambda task: [None, None] if next(bad) else [0.0, 1.0])
    got = world.gather(2, 1)
    assert world.asked == [2, 1] and len(got.kept.groups) == 2 and got.kept.dropped == {"not_scored": 2}


@pytest.mark.parametrize("how", ["keep", "drop"])
def test_without_refill_there_is_one_round(how):
    world = World(lambda task: [1.0, 1.0])
    got = world.gather(3, 0, how)
    assert world.asked == [3] and got.refills == 0 and len(got.kept.groups) == (3 if how == "keep" else 0)


def test_each_prompt_comes_once_an_epoch_whatever_is_dropped():
    rng = random.Random(0)
    world = World(lambda task: [rng.choice([0.0, 1.0]) for _ in range(2)])
    for _ in range(30):
        world.gather(3, 2)
    whole = len(world.seen) // 10
    assert whole >= 9
    for epoch in range(whole):
        assert sorted(world.seen[epoch * 10 : epoch * 10 + 10]) == sorted(t.id for t in TASKS)


# what counts as constant

TASK = TASKS[0]
PENALTY = partial(soft_overlong, max_tokens=10, cache_tokens=5)


def of_lengths(rewards, lengths):
    return Group(TASK, tuple(scored(TASK, r, i, length=n) for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))))


def test_the_filter_looks_at_the_reward_and_not_at_the_penalty_for_length():
    flat, apart = of_lengths([1.0, 1.0], [2, 9]), of_lengths([1.0, 0.2], [9, 5])
    # the penalty of 9 tokens is -0.8: it makes flat rewards differ, and 1.0 equal to 0.2
    assert keep([flat, apart], constant_groups="refill").groups == (apart,)
    batch = assemble([apart], advantage=center, length_penalty=PENALTY)
    assert [adv_of(row) for row in batch.rows] == pytest.approx([0, 0])
    batch = assemble([flat], advantage=center, length_penalty=PENALTY)
    assert [adv_of(row) for row in batch.rows] == pytest.approx([0.4, -0.4])
    assert [row.numbers["reward"] for row in batch.rows] == [1.0, 1.0]


def test_what_is_left_of_a_group_decides():
    """Samples without a reward leave; of what stays, one is constant by itself."""
    one, two = group(TASK, [None, 1.0, None]), group(TASKS[1], [None, 1.0, 0.0])
    assert [g.task.id for g in keep([one, two], constant_groups="drop").groups] == ["t1"]
    assert keep([one, two]).dropped == {"not_scored": 3}
    near = group(TASK, [0.7] * 7)              # whose mean in float32 is not 0.7
    assert not keep([near], constant_groups="drop").groups


def test_a_rollout_that_was_cut_off_leaves_after_the_advantages_were_made():
    cut = Group(TASK, (scored(TASK, 1.0, 0), scored(TASK, 0.0, 1, stop="max_tokens"), scored(TASK, 0.5, 2, stop="context")))
    whole = assemble([cut, group(TASKS[1], [1.0, 0.0])], advantage=standardize)
    some = assemble([cut, group(TASKS[1], [1.0, 0.0])], advantage=standardize, drop_truncated=True)
    assert some.rows == tuple(whole.rows[i] for i in (0, 3, 4))
    assert [row.numbers["rollout"] for row in some.rows] == [0, 3, 4]
    assert adv_of(some.rows[0]) > 0             # its group's mean counts those that were left out
    assert assemble([cut], advantage=standardize, drop_truncated=True).num_rollouts == 1


# whole runs

@pytest.fixture
def watch(monkeypatch):
    """What each step gathered and trained on."""
    steps = []
    take, update = Sync._gather, PolicyGradient.update

    def gathering(self):
        found = take(self)
        steps.append({"gathered": found[0]})
        return found

    def updating(self, batch):
        steps[-1] |= {"batch": batch, "version": self.session.state.version}
        metrics = update(self, batch)
        return metrics

    monkeypatch.setattr(Sync, "_gather", gathering)
    monkeypatch.setattr(PolicyGradient, "update", updating)
    return steps


RUN = {"tasks.held_out": 0, "evaluate.every_steps": 0, "train.steps": 5}


def trained_groups(step):
    rows = {}
    for row in step["batch"].rows:
        rows.setdefault(row.tokens[: row.mask.index(True)], []).append(row.numbers["reward"])
    return rows


@pytest.mark.parametrize("how", ["drop", "refill"])
def test_constant_groups_are_never_trained_on(tmp_path, watch, how):
    Trainer(tiny({**RUN, "algo.constant_groups": how}), out=tmp_path / "run").run()
    rows = [r for r in read_metrics(tmp_path / "run") if r["step"]]
    drawn = 0
    for step, row in zip(watch, rows, strict=True):
        got = step["gathered"]
        assert all(max(rewards) > min(rewards) for rewards in trained_groups(step).values())
        flat = [g for g in got.groups if len({s.reward for s in g.scored}) == 1]
        assert row["rollout/dropped_rollouts_count"] == 4 * len(flat) == got.kept.dropped.get("constant_group", 0)
        assert row["rollout/constant_groups_frac"] == pytest.approx(len(flat) / len(got.groups))
        assert len(got.groups) == 4 if how == "drop" else 4 <= len(got.groups) <= 16
        if how == "refill":
            assert row["rollout/refill_rounds_count"] == got.refills <= 3
            assert len(got.kept.groups) == 4 or got.refills == 3
        drawn += len(got.groups)
    assert (drawn > 20) == (how == "refill")


def test_a_task_that_comes_twice_in_a_step_has_samples_of_its_own(tmp_path, watch):
    """Refills can reach into the next epoch."""
    few = {"ref": "copy_digits", "length": 2, "size": 6}
    changes = {**RUN, "tasks.source": few, "algo.constant_groups": "refill", "train.prompts_per_step": 5}
    Trainer(tiny(changes), out=tmp_path / "run").run()
    visits, known = [], set()
    for step in watch:
        groups = step["gathered"].groups
        visits += [g.task.id for g in groups]
        for item in (item for g in groups for item in g.scored):
            assert (item.rollout.task.id, item.rollout.sample) not in known
            known.add((item.rollout.task.id, item.rollout.sample))
    assert any(len({g.task.id for g in step["gathered"].groups}) < len(step["gathered"].groups) for step in watch)
    for epoch in range(len(visits) // 6):
        assert max(Counter(visits[epoch * 6 : epoch * 6 + 6]).values()) == 1


def test_a_run_whose_groups_are_all_constant_goes_on_without_an_update(tmp_path, watch):
    part = tmp_path / "same.py"
    part.write_text("def same(rollout, task):\n    return 1.0\n")
    changes = {**RUN, "rewards": [{"fn": f"{part}:same", "isolate": False}], "algo.constant_groups": "refill", "algo.refill_rounds": 1}
    Trainer(tiny(changes), out=tmp_path / "run").run()
    rows = [r for r in read_metrics(tmp_path / "run") if r["step"]]
    assert [r["rollout/refill_rounds_count"] for r in rows] == [1] * 5 and [r["train/rollouts_count"] for r in rows] == [0] * 5
    assert watch[-1]["version"] == 0


def test_rollouts_that_were_cut_off_are_left_out_and_counted(tmp_path, watch):
    Trainer(tiny({**RUN, "algo.truncated": "drop", "sampling.max_new_tokens": 3}), out=tmp_path / "run").run()
    rows = [r for r in read_metrics(tmp_path / "run") if r["step"]]
    left = 0
    for step, row in zip(watch, rows, strict=True):
        items = [item for g in step["gathered"].groups for item in g.scored]
        cut = sum(item.rollout.truncated for item in items)
        left += len(items) - cut
        assert row["rollout/dropped_rollouts_count"] == row["rollout/left_out_count"] == cut > 0
        assert len(step["batch"].rows) == 16 - cut
        whole = assemble(step["gathered"].kept.groups, advantage=standardize)
        by_place = {row.numbers["rollout"]: row for row in whole.rows}
        assert all(by_place[row.numbers["rollout"]].columns["adv"] == row.columns["adv"] for row in step["batch"].rows)
    assert left > 0
    for step in range(1, 6):
        for item in parquet.read_table(tmp_path / "run" / "rollouts" / f"step-{step:06d}.parquet").to_pylist():
            assert (item["advantage"] is None) == (item["stop"] in ("max_tokens", "context"))


def test_tasks_without_a_greedy_answer_to_beat_are_left_out_and_the_others_keep_their_place(tmp_path, watch, monkeypatch):
    from burnish.api import policy_gradient

    whole = policy_gradient.run_groups

    def first_one_fails(visits, **values):
        groups = whole(visits, **values)
        assert values["purpose"] == "greedy" and values["samples_per_prompt"] == 1 and values["sampling"].temperature == 0
        bad = replace(groups[0].scored[0], reward=None)
        return [replace(groups[0], scored=(bad,)), *groups[1:]]

    monkeypatch.setattr(policy_gradient, "run_groups", first_one_fails)
    Trainer(tiny({**RUN, "algo.advantage": "above_greedy", "train.steps": 2}), out=tmp_path / "run").run()
    for number, step in enumerate(watch, 1):
        assert [row.numbers["rollout"] for row in step["batch"].rows] == list(range(4, 16))
        stored = parquet.read_table(tmp_path / "run" / "rollouts" / f"step-{number:06d}.parquet").to_pylist()
        assert [item["advantage"] for item in stored[:4]] == [None] * 4
        assert [item["advantage"] for item in stored[4:]] == pytest.approx([adv_of(row) for row in step["batch"].rows])
    rows = [r for r in read_metrics(tmp_path / "run") if r["step"]]
    assert [r["rollout/left_out_count"] for r in rows] == [r["rollout/dropped_rollouts_count"] for r in rows] == [4, 4]
