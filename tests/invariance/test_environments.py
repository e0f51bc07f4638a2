"""Several environments in one run: each row is trained by its own algorithm, with the counts of all rows; metrics, refill, resume."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from parts import CLIP, PLAIN, adv_of, assert_same_gradients, gradients, on_policy, random_rows, state_of, weights_of
from pyarrow import parquet
from tiny import tiny, whole_and_resumed

from burnish.algorithms import corrections
from burnish.algorithms.penalties import KlController
from burnish.algorithms.policy_losses import cispo, reinforce, sapo
from burnish.algorithms.reduce import rollout_mean, rollout_sum_over, token_mean
from burnish.api import Trainer
from burnish.api.policy_gradient import PolicyGradient
from burnish.models.load import load
from burnish.monitor.metrics import metric
from burnish.monitor.writer import read_metrics
from burnish.trainer import Algorithm, Correction, EntropyTerm, KlTerm, train_step
from burnish.types import Batch

SOFT = Correction(partial(corrections.token_truncate, high=1.1))
HARD = Correction(partial(corrections.token_mask, low=0.9, high=1.1), denominator="kept")
KL = KlTerm("k3", "naive", KlController(0.1))
ALGORITHMS = {
    "clip": Algorithm(CLIP, token_mean, correction=SOFT), "rollout_mean": Algorithm(CLIP, rollout_mean, correction=HARD),
    "reinforce": Algorithm(reinforce, partial(rollout_sum_over, length=20), entropy=EntropyTerm(0.01)),
    "cispo": Algorithm(partial(cispo, ratio_min=0.0, ratio_max=5.0), token_mean, kl=KL),
    "gen": Algorithm(partial(sapo, tau_pos=1.0, tau_neg=1.05), token_mean, prox="gen"),
    "interpolated": Algorithm(CLIP, token_mean, correction=SOFT, prox="interpolated"),
}


def named(rows, names=("one", "two")):
    return [replace(row, algo=names[i % len(names)]) for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def tiny_state(tiny_llama):
    return state_of(tiny_llama)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_same_algorithm_in_both_is_one_environment_with_all_rows(tiny_state, name, minibatches):
    rows, algo = random_rows(7, ref=True), ALGORITHMS[name]
    values = {"minibatches": minibatches, "tokens_per_micro_batch": 60}
    one, metrics = gradients(tiny_state, Batch(tuple(rows)), algo, **values)
    two, found = gradients(tiny_state, Batch(tuple(named(rows))), {"one": algo, "two": algo, "none of the rows": algo}, **values)
    assert_same_gradients(two, one)
    assert {n: v for n, v in found.items() if not n.startswith("train/entropy_nats_")} == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def nothing(logp_cur):
    return 0.0 * logp_cur


@pytest.mark.parametrize(("one", "two"), [("clip", "reinforce"), ("rollout_mean", "cispo"), ("gen", "interpolated")])
def test_each_row_is_trained_by_its_own_algorithm(tiny_state, one, two):
    """The gradient is the sum of what each algorithm makes of its own rows, in the counts of all rows, however they are split."""
    batch = Batch(tuple(named(random_rows(7, ref=True))))
    first, second, rest = ALGORITHMS[one], ALGORITHMS[two], Algorithm(nothing, token_mean)
    (both,), metrics = gradients(tiny_state, batch, {"one": first, "two": second})
    (left,), _ = gradients(tiny_state, batch, {"one": first, "two": rest})
    (right,), _ = gradients(tiny_state, batch, {"one": rest, "two": second})
    (crossed,), _ = gradients(tiny_state, batch, {"one": second, "two": first})
    assert_same_gradients([both], [{n: left[n] + right[n] for n in left}])
    assert not all(torch.allclose(both[n], crossed[n], rtol=1e-2) for n in both)
    for tokens in (1, 50):
        (split,), found = gradients(tiny_state, batch, {"one": first, "two": second}, tokens_per_micro_batch=tokens)
        assert_same_gradients([split], [both])
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_entropies_are_told_apart(tiny_state):
    rows = named(on_policy(tiny_state, random_rows(6)).rows)
    algo = Algorithm(CLIP, token_mean, entropy=EntropyTerm(0.0))
    _, metrics = gradients(tiny_state, Batch(tuple(rows)), {"one": algo, "two": algo})
    for name in ("one", "two"):
        own = Batch(tuple(replace(r, algo="") for r in rows if r.algo == name))
        _, alone = gradients(tiny_state, own, algo)
        assert metrics[f"train/entropy_nats_{name}"] == pytest.approx(alone["train/entropy_nats"], rel=1e-5)


# whole runs

def places(**of_second):
    """Two environments; the second has its own algorithm where it is given one."""
    first = {"name": "copy", "tasks": {"source": {"ref": "copy_digits", "length": 2}, "held_out": 6}, "prompts_per_step": 3}
    second = {"name": "sums", "tasks": {"source": {"ref": "sort_digits", "length": 2}, "held_out": 4}, "prompts_per_step": 2}
    reward = {"rewards": [{"fn": "positions", "isolate": False}]}
    return {
        "tasks": None, "rewards": [], "environments": [{**first, **reward}, {**second, **reward, **of_second}],
        "train.prompts_per_step": 5, "train.steps": 3, "evaluate.every_steps": 0,
    }


@pytest.fixture
def watch(monkeypatch):
    """Each step's rows, and the policy's weights before and after."""
    steps = []
    update = PolicyGradient.update

    def watched(self, batch):
        before = weights_of(self.session.state)
        metrics = update(self, batch)
        steps.append({"batch": batch, "before": before, "after": weights_of(self.session.state), "metrics": metrics, "learner": self})
        return metrics

    monkeypatch.setattr(PolicyGradient, "update", watched)
    return steps


CLIPPED = {"loss": {"ref": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28}}


def test_a_run_with_one_algorithm_twice_is_the_run_of_one_batch(tmp_path, watch):
    settings = tiny({**places(algo=CLIPPED), "optim.warmup_updates": 0, "optim.schedule": "constant"})
    Trainer(settings, out=tmp_path / "run").run()
    first = watch[0]
    assert {row.algo for row in first["batch"].rows} == {"copy", "sums"}
    assert [row.algo for row in first["batch"].rows].count("copy") == 12
    state = state_of(load(settings.model, seed=0))
    assert all(torch.equal(m, first["before"][n]) for n, m in state.weights.masters.items())
    rows = tuple(replace(row, algo="") for row in first["batch"].rows)
    part = first["learner"].parts["copy"]
    train_step(state, Batch(rows), part.objective, **first["learner"].session.step_values())
    for name, m in state.weights.masters.items():
        torch.testing.assert_close(m, first["after"][name], rtol=1e-4, atol=1e-5)


def test_groups_stay_among_their_own_and_metrics_carry_their_name(tmp_path, watch):
    """Advantages compare samples of one task, and those over the step the samples of one environment."""
    adaptive = {"coef": 0.01, "target_nats": 0.001}
    own = {
        "advantage": "minus_batch_mean", "loss": "reinforce", "reduce": "rollout_mean", "entropy": {**adaptive, "target_nats": 9.0},
        "kl": {"coef": 0.2, "target_nats": 0.5},
    }
    changes = {**places(algo=own), "algo.entropy": adaptive, "algo.kl": {"coef": 0.1, "place": "reward", "target_nats": 0.5}}
    Trainer(tiny(changes), out=tmp_path / "run").run()
    for step in watch:
        rows = [row for row in step["batch"].rows if row.algo == "sums"]
        rewards = [row.numbers["reward"] for row in rows]
        assert [adv_of(row) for row in rows] == pytest.approx([reward - sum(rewards) / len(rewards) for reward in rewards])
        assert step["metrics"].keys() >= {
            f"train/{what}_{name}" for what in ("kl_coef", "entropy_coef", "entropy_nats") for name in ("copy", "sums")
        }
    written = read_metrics(tmp_path / "run")
    assert all(metric(name) for name in {n for row in written for n in row} - {"step", "not_finite"})
    for row, step in zip([r for r in written if r["step"]], watch, strict=True):
        for name in ("copy", "sums"):
            rewards = [r.numbers["reward"] for r in step["batch"].rows if r.algo == name]
            assert row[f"rollout/reward_{name}_mean"] == pytest.approx(sum(rewards) / len(rewards))
    # entropy is above the one target and below the other: one coefficient stays 0, the other one grows
    last = watch[-1]["metrics"]
    assert last["train/entropy_coef_copy"] == 0 < watch[1]["metrics"]["train/entropy_coef_sums"] < last["train/entropy_coef_sums"]
    assert last["train/kl_coef_copy"] < 0.1 and last["train/kl_coef_sums"] < 0.2


def test_advantages_are_stored_with_their_rollouts(tmp_path, watch):
    Trainer(tiny(places(algo={**CLIPPED, "advantage": "center"})), out=tmp_path / "run").run()
    stored = parquet.read_table(tmp_path / "run" / "rollouts" / "step-000001.parquet").to_pylist()
    assert len(stored) == 20 and any(item["advantage"] for item in stored)
    for at in range(0, 20, 4):
        mean = sum(item["reward"] for item in stored[at : at + 4]) / 4
        for item in stored[at : at + 4]:
            assert (item["advantage"] > 0) == (item["reward"] > mean + 1e-9)
    assert sorted(item["advantage"] for item in stored) == pytest.approx(sorted(map(adv_of, watch[0]["batch"].rows)))


def test_one_environment_may_refill_and_leave_out_beside_another(tmp_path, watch):
    own = {**CLIPPED, "constant_groups": "refill", "refill_rounds": 4, "truncated": "drop"}
    Trainer(tiny(places(algo=own)), out=tmp_path / "run").run()
    learner = watch[0]["learner"]
    taken = {name: cursor.position for name, cursor in learner.session.cursors.items()}
    assert taken["copy"] == 9 and 6 < taken["sums"] <= 3 * 2 * 5
    for step in watch:
        assert [row.algo for row in step["batch"].rows].count("copy") == 12
    rows = [r for r in read_metrics(tmp_path / "run") if r["step"]]
    assert sum(r["rollout/refill_rounds_count"] for r in rows) > 0
    for row, step in zip(rows, watch, strict=True):
        sampled = 4 * (3 + 2) if row["rollout/refill_rounds_count"] == 0 else None
        if sampled:
            assert row["rollout/dropped_rollouts_count"] == sampled - len(step["batch"].rows)
        assert row["rollout/left_out_count"] <= row["rollout/dropped_rollouts_count"]


def test_stopped_and_resumed_is_the_same_to_the_last_bit(tmp_path):
    own = {
        "advantage": "minus_ema", "loss": "reinforce", "entropy": {"coef": 0.01, "target_nats": 2.4},
        "kl": {"coef": 0.2, "target_nats": 0.01, "horizon_rollouts": 50},
    }
    changes = {
        **places(algo=own), "train.steps": 6, "train.epochs": 2, "algo.constant_groups": "refill",
        "algo.kl": {"coef": 0.1, "target_nats": 0.01, "horizon_rollouts": 50}, "algo.prox": "interpolated",
    }
    whole, resumed = whole_and_resumed(tmp_path, changes, stop_in_step=4)
    assert whole == resumed
    assert {"copy/kl", "sums/kl", "sums/entropy", "sums/entropy_control", "sums/baseline"} <= whole["state"]["controls"].keys()
    assert whole["state"]["cursors"].keys() == {"copy", "sums"}


@pytest.mark.parametrize("kind", ["model", "head"])
def test_one_critic_serves_all_environments(tmp_path, watch, kind):
    gae = {"advantage": {"ref": "gae", "gamma": 1.0, "lam": 0.95}}
    changes = {**places(algo={**gae, **CLIPPED}), "critic": {"kind": kind}, "algo.advantage": {**gae["advantage"], "lam": 0.9}}
    Trainer(tiny(changes), out=tmp_path / "run").run()
    assert all({"ret", "value_prox"} <= row.columns.keys() for step in watch for row in step["batch"].rows)
    assert all(step["metrics"]["train/value_error"] >= 0 for step in watch)


def test_dropping_all_rows_of_an_environment_leaves_the_other_as_it_is(tiny_state):
    rows = named(random_rows(6))
    algo = Algorithm(CLIP, token_mean)
    some = Batch(tuple(r for r in rows if r.algo == "one"))
    (with_name,), _ = gradients(tiny_state, some, {"one": algo, "two": algo})
    (alone,), _ = gradients(tiny_state, Batch(tuple(replace(r, algo="") for r in some.rows)), algo)
    assert_same_gradients([with_name], [alone])


def test_a_row_whose_algorithm_nobody_gives_is_an_error(tiny_state):
    with pytest.raises(ValueError, match=r"algorithm 'two', and objectives are given for \['one'\]"):
        train_step(
            tiny_state, Batch(tuple(named(random_rows(3)))), {"one": Algorithm(CLIP, token_mean)}, sampling=PLAIN, lr_of=lambda u: 1e-3,
            clip_norm=1.0,
        )
