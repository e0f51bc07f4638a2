"""Preference runs: they learn, resume to the same bits, and run no reference that no loss asks for."""

from __future__ import annotations

import math

import pytest
from tiny import tiny, whole_and_resumed

from burnish.api import Trainer
from burnish.config.load import load_recipe
from burnish.config.presets import PREFERENCES
from burnish.monitor.writer import read_metrics
from burnish.trainer import Reference

OFFLINE = {
    "loop": "preference", "tasks": None, "rewards": [], "algo": None, "sampling": {},
    "data": {"source": {"ref": "pairs_of_tasks", "tasks": {"ref": "copy_digits", "length": 3}, "seed": 1}, "held_out": 60},
    "train": {"steps": 30, "examples_per_step": 32}, "evaluate": {"every_steps": 15}, "checkpoint": {"every_steps": 30},
}
RATED = {**OFFLINE, "data": {"source": {"ref": "ratings_of_tasks", "tasks": {"ref": "copy_digits", "length": 3}}, "held_out": 60}}
ONLINE = {
    "algo": None, "tasks": {"source": {"ref": "copy_digits", "length": 1}}, "sampling.max_new_tokens": 1,
    "train": {"steps": 60, "prompts_per_step": 10, "samples_per_prompt": 8}, "optim.lr": 1e-2, "checkpoint": {"every_steps": 60},
    "evaluate": {}, "preference": {"losses": [{"fn": {"ref": "sigmoid", "beta": 0.1}}]},
}
KTO = {"ref": "kto", "beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.0}


def losses(*fns, **values):
    return {"preference": {"losses": [{"fn": fn} for fn in fns], **values}}


def run(folder, changes):
    Trainer(tiny(changes), out=folder / "run").run()
    return read_metrics(folder / "run")


def held_out(rows, name="preference_accuracy_frac"):
    return [row[f"eval/{name}"] for row in rows if f"eval/{name}" in row]


@pytest.mark.parametrize("changes", [
    {**OFFLINE, **losses({"ref": "sigmoid", "beta": 0.1})},
    {**OFFLINE, **losses({"ref": "sigmoid", "beta": 0.1}), "model.dtype": "bfloat16"},
    {**OFFLINE, **losses({"ref": "aot", "beta": 0.1}), "train.tokens_per_micro_batch": 100},
    {**OFFLINE, **losses({"ref": "simpo", "beta": 2.0, "gamma": 1.0}, nll_coef=0.1)},
    {**RATED, **losses(KTO), "train.tokens_per_micro_batch": 200},
], ids=["dpo", "dpo bfloat16", "aot in micro-batches", "simpo", "kto in micro-batches"])
def test_held_out_answers_come_in_order(tmp_path, changes):
    rows = run(tmp_path, changes)
    accuracy = held_out(rows)
    assert 0.3 <= accuracy[0] <= 0.7
    assert accuracy[-1] > 0.7
    assert held_out(rows, "loss")[-1] < held_out(rows, "loss")[0]
    assert held_out(rows, "reward_chosen_mean")[-1] > held_out(rows, "reward_rejected_mean")[-1]


def test_at_the_start_dpo_is_ln_two_on_both_sides(tmp_path):
    rows = run(tmp_path, {**OFFLINE, **losses({"ref": "sigmoid", "beta": 0.1}), "train.steps": 1})
    assert rows[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["eval/preference_accuracy_frac"] == pytest.approx(0.5, abs=0.2)
    assert rows[1]["train/rollouts_count"] == 64


@pytest.mark.parametrize("changes", [{}, {"preference.nll_coef": 0.3, "preference.refresh_steps": 10}], ids=["online dpo", "irpo"])
def test_the_reward_of_own_samples_rises(tmp_path, changes):
    rows = run(tmp_path, {**ONLINE, **changes})
    rewards = [row["rollout/reward_mean"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.25
    assert sum(rewards[-3:]) / 3 > 0.6
    assert all(abs(row["train/kl_cur_gen_nats"]) < 1e-9 for row in rows if "train/kl_cur_gen_nats" in row)


def test_only_best_and_worst_of_groups_that_differ_are_trained_on(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def mine(rollout, task): return float(rollout.sample) if task.prompt < '5' else 1.0\n")
    rewards = [{"fn": f"{file}:mine", "isolate": False}]
    rows = run(tmp_path, {**ONLINE, "rewards": rewards, "train.steps": 1, "train.samples_per_prompt": 4})
    assert rows[0]["train/rollouts_count"] == 2 * 5
    assert rows[0]["rollout/constant_groups_frac"] == 0.5
    assert rows[0]["rollout/dropped_rollouts_count"] == 5 * 4
    assert rows[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("changes", [
    {**OFFLINE, **losses({"ref": "sigmoid", "beta": 0.1}, refresh_steps=2, refresh_mix=0.5)},
    {**OFFLINE, **losses({"ref": "bco_pair", "beta": 0.1})},
    {**RATED, **losses(KTO), "train.epochs": 2},
    {**ONLINE, "preference.refresh_steps": 3},
], ids=["tr-dpo", "bco", "kto", "online with refresh"])
def test_resumed_is_the_same_to_the_last_bit(tmp_path, changes):
    small = {"train.steps": 7, "evaluate.every_steps": 1, "checkpoint.every_steps": 3}
    if changes.get("loop") == "preference":
        small["train.examples_per_step"] = 8
    whole, resumed = whole_and_resumed(tmp_path, {**changes, **small}, stop_in_step=5)
    assert whole == resumed


def test_the_reference_follows_where_it_is_told_to(tmp_path):
    """With mix 1 it is the policy itself, so that in the step after it every margin is 0 and DPO's loss is ln 2 again."""
    moving = losses({"ref": "sigmoid", "beta": 1.0}, refresh_steps=2)
    rows = run(tmp_path, {**OFFLINE, **moving, "train.steps": 6, "evaluate.every_steps": 1, "optim.schedule": "constant"})
    margins = [row["train/preference_margin"] for row in rows[1:]]
    assert [margins[at] for at in (0, 2, 4)] == pytest.approx([0, 0, 0], abs=1e-5)
    assert all(abs(margins[at]) > 1e-3 for at in (1, 3, 5))
    held = [row["eval/reward_chosen_mean"] for row in rows]          # the reference of held-out answers follows too
    assert [held[at] for at in (0, 2, 4, 6)] == pytest.approx([0, 0, 0, 0], abs=1e-5)


def test_bco_takes_the_mean_reward_of_the_steps_before(tmp_path):
    rows = run(tmp_path, {**OFFLINE, **losses({"ref": "bco_pair", "beta": 0.5}), "train.steps": 4})[1:]
    means = [(row["train/reward_chosen_mean"] + row["train/reward_rejected_mean"]) / 2 for row in rows]
    assert [row["train/running_reward"] for row in rows] == pytest.approx([0, *(sum(means[:n]) / n for n in (1, 2, 3))], abs=1e-7)
    assert abs(rows[-1]["train/running_reward"]) > 1e-4
    fixed = run(tmp_path / "fixed", {**OFFLINE, **losses({"ref": "bco_pair", "beta": 0.5, "delta": 0.0}), "train.steps": 1})
    assert "train/running_reward" not in fixed[1]


@pytest.mark.parametrize("changes, runs", [
    (losses({"ref": "sigmoid", "beta": 0.1}), True),
    (losses({"ref": "cpo", "beta": 0.1}, nll_coef=1.0), False),
    (losses({"ref": "orpo"}, nll_coef=1.0), False),
    (losses({"ref": "sigmoid", "beta": 0.1}, reference="none"), False),
])
def test_the_reference_is_there_only_where_a_loss_asks_for_it(tmp_path, monkeypatch, changes, runs):
    made = []
    real = Reference.__init__
    monkeypatch.setattr(Reference, "__init__", lambda self, *args, **values: (made.append(1), real(self, *args, **values))[1])
    run(tmp_path, {**OFFLINE, **changes, "train.steps": 1})
    assert bool(made) is runs


def test_reference_free_dpo_is_cpo(tmp_path):
    one = run(tmp_path / "a", {**OFFLINE, **losses({"ref": "sigmoid", "beta": 0.1}, reference="none"), "train.steps": 3})
    other = run(tmp_path / "b", {**OFFLINE, **losses({"ref": "cpo", "beta": 0.1}), "train.steps": 3})
    assert [row["eval/loss"] for row in one if "eval/loss" in row] == [row["eval/loss"] for row in other if "eval/loss" in row]


def test_answers_that_are_too_long_are_left_out_and_counted(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from burnish.types import Pair\n"
        "def mine():\n"
        "    return [Pair(str(i), f'{i}>', '7', '7' * (9 if i % 4 == 0 else 2)) for i in range(16)]\n"
    )
    changes = {"data": {"source": f"{file}:mine", "max_tokens": 7}, "train.examples_per_step": 16, "train.steps": 1}
    (row,) = run(tmp_path, {**OFFLINE, **changes, **losses({"ref": "sigmoid", "beta": 0.1})})
    assert (row["train/too_long_count"], row["train/rollouts_count"]) == (4, 24)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PREFERENCES)
def test_a_tiny_recipe_learns(tmp_path, preset):
    recipe = f"{preset.replace('_', '-')}-tiny"
    rows = read_metrics(Trainer.from_recipe(recipe, out=tmp_path / "run").run().folder)
    if "eval/preference_accuracy_frac" in rows[0]:
        accuracy = held_out(rows)
        assert 0.4 <= accuracy[0] <= 0.6
        assert accuracy[-1] > (0.8 if "over 0.8" in load_recipe(recipe).expect else 0.9)
    else:
        rewards = [row["rollout/reward_mean"] for row in rows]
        assert rewards[0] < 0.3
        assert sum(rewards[-5:]) / 5 > 0.9
