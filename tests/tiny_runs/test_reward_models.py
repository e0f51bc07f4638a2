"""Reward models of every kind learn, resume to the same bits, and a policy learns from what they say."""

from __future__ import annotations

import statistics

import pytest
from tiny import tiny, whole_and_resumed
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from burnish.api import Trainer
from burnish.monitor.rollouts import read_rollouts
from burnish.monitor.writer import read_metrics

BASE = {
    "loop": "reward_model", "tasks": None, "rewards": [], "algo": None, "sampling": {}, "train": {"steps": 60, "examples_per_step": 32},
    "evaluate": {"every_steps": 30}, "checkpoint": {"every_steps": 30},
}


def data(source, held_out=20):
    return {"data": {"source": source, "held_out": held_out}}


PAIRS = {**BASE, **data({"ref": "digit_sum_pairs", "size": 2000, "margins": True}), "reward_model": {"center_coef": 0.01}}
RATINGS = {
    **BASE, **data({"ref": "digit_sum_ratings", "size": 2000, "known_frac": 0.7}),
    "reward_model": {"loss": "squared_error", "outputs": 2},
}
CLASSES = {
    **BASE, **data({"ref": "digit_sum_ratings", "size": 2000, "kind": "classes"}),
    "reward_model": {"loss": "ordinal", "classes": 3},
}
STEPS = {
    **BASE, **data({"ref": "steps_of_tasks", "tasks": {"ref": "copy_digits", "length": 3}}, 100),
    "reward_model": {"loss": "step_cross_entropy", "outputs": 2, "reduce": "rollout_mean"}, "train.steps": 150, "evaluate.every_steps": 75,
}
KINDS = {"pairs": PAIRS, "ratings": RATINGS, "classes": CLASSES, "steps": STEPS}


def held_out(folder, name):
    return [row[f"eval/{name}"] for row in read_metrics(folder) if f"eval/{name}" in row]


@pytest.mark.parametrize(("kind", "metric", "first", "last", "more"), [
    ("pairs", "preference_accuracy_frac", 0.5, 0.9, {}),
    ("pairs", "preference_accuracy_frac", 0.5, 0.9, {"model.dtype": "bfloat16", "train.tokens_per_micro_batch": 100}),
    ("pairs", "preference_accuracy_frac", 0.5, 0.6, {"model.lora": {"rank": 8}, "optim.lr": 1e-2}),
    ("ratings", "rating_error_mean", 0.18, 0.09, {}),
    ("classes", "label_accuracy_frac", 0.42, 0.75, {}),
    ("steps", "step_accuracy_frac", 0.5, 0.7, {}),
], ids=["pairs", "pairs bfloat16", "pairs lora", "ratings", "classes", "steps"])
def test_held_out_answers_are_judged_better(tmp_path, kind, metric, first, last, more):
    done = Trainer(tiny({**KINDS[kind], **more}), out=tmp_path / "run").run()
    found, loss = held_out(tmp_path / "run", metric), held_out(tmp_path / "run", "loss")
    assert found[0] == pytest.approx(first, abs=0.06)
    assert found[-1] < last if metric == "rating_error_mean" else found[-1] > last
    assert loss[-1] < loss[0]
    rows = read_metrics(tmp_path / "run")
    assert not any(row.get("train/skipped_updates_count") for row in rows)
    assert AutoModelForSequenceClassification.from_pretrained(done.model).config.num_labels == {"ratings": 2, "steps": 2}.get(kind, 1)
    tokenizer = AutoTokenizer.from_pretrained(done.model)
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_the_same_to_the_last_bit(tmp_path, kind):
    short = {"train.steps": 6, "train.examples_per_step": 8, "evaluate.every_steps": 3, "checkpoint.every_steps": 2}
    whole, resumed = whole_and_resumed(tmp_path, {**KINDS[kind], **short}, stop_in_step=4)
    assert whole == resumed


def test_a_run_from_an_exported_model_goes_on_where_it_ended(tmp_path):
    """Head and thresholds included: its first measure is the last one of the run before."""
    first = Trainer(tiny({**CLASSES, "train.steps": 20}), out=tmp_path / "one").run()
    Trainer(tiny({**CLASSES, "train.steps": 1, "model": {"path": str(first.model)}}), out=tmp_path / "two").run()
    assert held_out(tmp_path / "two", "loss")[0] == pytest.approx(held_out(tmp_path / "one", "loss")[-1], rel=1e-5)


# and then a policy

@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name, changes in (("pairs", PAIRS), ("more pairs", {**PAIRS, "seed": 1}), ("ratings", RATINGS), ("steps", STEPS)):
        made[name] = str(Trainer(tiny(changes), out=root / name).run().model)
    return made


def policy(fn, **changes):
    return {
        "rewards": [{"fn": {"ref": "learned", **fn}, "isolate": False}],
        "train": {"steps": 40, "prompts_per_step": 8, "samples_per_prompt": 8},
        "evaluate": {"every_steps": 20, "sampling": {"max_new_tokens": 2}}, "checkpoint": {"every_steps": 40}, **changes,
    }


def digit_sums(folder, step):
    scored = [s for g in read_rollouts(folder / "rollouts" / f"step-{step:06d}.parquet") for s in g.scored]
    return statistics.mean(sum(int(c) for c in s.rollout.text if c.isdigit()) for s in scored if s.reward is not None)


@pytest.mark.parametrize("combine", ["mean", "minimum", {"ref": "mean_minus_variance", "coef": 0.5}], ids=str)
def test_a_policy_learns_what_the_reward_models_learned(tmp_path, models, combine):
    """They were taught that the larger sum of digits is better."""
    Trainer(tiny(policy({"paths": [models["pairs"], models["more pairs"]], "combine": combine})), out=tmp_path / "run").run()
    assert digit_sums(tmp_path / "run", 40) > digit_sums(tmp_path / "run", 1) + 3
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["rollout/score_learned_mean"] == rows[-1]["rollout/reward_mean"] > rows[1]["rollout/reward_mean"] + 1


def test_several_outputs_of_one_model_and_running_normalisation(tmp_path, models):
    fn = {"paths": [models["ratings"]], "weights": [1.0, -1.0]}
    changes = policy(fn, **{"rewards.0.normalize": {"ref": "RunningNorm", "eps": 1e-8, "ddof": 1}})
    Trainer(tiny(changes), out=tmp_path / "run").run()
    rows = read_metrics(tmp_path / "run")
    assert digit_sums(tmp_path / "run", 40) > digit_sums(tmp_path / "run", 1) + 2
    first = [s for g in read_rollouts(tmp_path / "run" / "rollouts" / "step-000001.parquet") for s in g.scored if s.reward is not None]
    assert abs(sum(s.reward for s in first)) < 1e-9, "of the first step all is seen"
    assert rows[1]["rollout/reward_mean"] == pytest.approx(rows[1]["rollout/score_learned_mean"]), "metrics tell rewards as they were given"
    assert rows[-1]["rollout/reward_mean"] > 0.3
    assert max(abs(v) for v in held_out(tmp_path / "run", "reward_mean")) < 1.2, "held-out rewards keep the unit of the ratings"


@pytest.mark.parametrize("norm", [{"ref": "RunningNorm", "eps": 1e-8, "ddof": 1}, {"ref": "EmaNorm", "decay": 0.9, "eps": 1e-8, "ddof": 0}],
                         ids=lambda n: n["ref"])
def test_the_statistics_come_back_on_resume(tmp_path, models, norm):
    changes = {
        "rewards": [{"fn": {"ref": "learned", "paths": [models["pairs"]]}, "isolate": False, "name": "liked", "normalize": norm}],
        "algo.advantage": "reward_itself",
    }
    whole, resumed = whole_and_resumed(tmp_path, changes, stop_in_step=4)
    assert whole == resumed
    assert whole["state"]["controls"]["liked/norm"]["mean"] != 0


def test_a_policy_learns_from_a_process_reward_model(tmp_path, models):
    changes = policy({"paths": [models["steps"]], "steps": "."}, **{
        "algo.advantage": "standardize_steps", "tasks.source": {"ref": "copy_digits", "length": 3}, "tasks.held_out": 0, "evaluate": {},
        "sampling.max_new_tokens": 3, "train.steps": 60, "train.samples_per_prompt": 16,
    })
    Trainer(tiny(changes), out=tmp_path / "run").run()
    rows = read_metrics(tmp_path / "run")
    assert sum(r["rollout/reward_mean"] for r in rows[-5:]) / 5 > sum(r["rollout/reward_mean"] for r in rows[:5]) / 5 + 0.3
    scored = [s for g in read_rollouts(tmp_path / "run" / "rollouts" / "step-000060.parquet") for s in g.scored if s.reward is not None]
    assert all(s.reward == pytest.approx(sum(v for _, v in s.steps)) and len(s.steps) == len(s.rollout.text) for s in scored)


def test_process_rewards_resume_to_the_same_bits(tmp_path):
    changes = {"rewards": [{"fn": "each_position"}, {"fn": "exact"}], "algo.advantage": "standardize_steps"}
    whole, resumed = whole_and_resumed(tmp_path, changes, stop_in_step=4)
    assert whole == resumed
