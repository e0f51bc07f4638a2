"""T24 in whole runs: the learning rate of every update, for epochs, minibatches and warm-up, of the policy and of the critic."""

from __future__ import annotations

import itertools

import pytest
from tiny import tiny

from burnish.api import Trainer
from burnish.monitor.writer import read_metrics
from burnish.trainer import schedule, step

STEPS = 3
RUN = {
    "tasks.held_out": 0, "evaluate.every_steps": 0, "train.steps": STEPS, "checkpoint.every_steps": 100, "sampling.max_new_tokens": 1,
    "algo.advantage": {"ref": "gae", "gamma": 1.0, "lam": 0.95}, "optim.lr": 1e-3, "optim.final_lr_frac": 0.1,
}
LR = {"policy": 1e-3, "critic": 4e-3}


@pytest.fixture
def rates(monkeypatch):
    """(update, learning rate) of every update that was made: those of the policy, then those of the critic."""
    made = {}
    apply = step._apply

    def noting(state, finite, tally, *, lr, **values):
        moved = apply(state, finite, tally, lr=lr, **values)
        assert {group["lr"] for group in state.optimizer.param_groups} == {lr}
        made.setdefault("critic" if hasattr(state.policy.base, "score") else "policy", []).append((state.updates, lr))
        return moved

    monkeypatch.setattr(step, "_apply", noting)
    return made


@pytest.mark.parametrize(("epochs", "minibatches", "warmup", "kind"), [
    *((e, m, w, "cosine") for e, m, w in itertools.product((1, 2), (1, 3), (0, 2))),
    (2, 3, 0, "linear"), (2, 3, 2, "linear"), (1, 3, 100, "cosine"), (2, 1, 6, "linear"), (2, 2, 1, "constant"),
])
def test_every_update_has_the_rate_of_its_number(tmp_path, rates, epochs, minibatches, warmup, kind):
    changes = {
        **RUN, "critic": {"lr": LR["critic"]}, "train.epochs": epochs, "train.minibatches": minibatches, "optim.warmup_updates": warmup,
        "optim.schedule": kind, "optim.final_lr_frac": 0.0 if kind == "constant" else 0.1,
    }
    Trainer(tiny(changes), out=tmp_path / "run").run()
    total = STEPS * epochs * minibatches
    final = changes["optim.final_lr_frac"]
    for name, lr in LR.items():
        assert [update for update, _ in rates[name]] == list(range(1, total + 1))
        for update, rate in rates[name]:
            assert rate == schedule(update, total=total, lr=lr, warmup_updates=warmup, kind=kind, final_lr_frac=final)
        first, last = rates[name][0][1], rates[name][-1][1]
        half = rates[name][total // 2 - 1][1] if total % 2 == 0 else None
        if warmup >= total:
            assert last == pytest.approx(lr * total / warmup)
        elif kind != "constant":
            assert last == pytest.approx(final * lr)
        if warmup:
            assert first == pytest.approx(lr / warmup)
        if half is not None and warmup == 0 and kind != "constant":
            assert half == pytest.approx(lr * (1 + final) / 2)
        if kind == "constant":
            assert {rate for _, rate in rates[name]} == {lr}
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert [row["train/lr"] for row in rows] == [rates["policy"][(i + 1) * epochs * minibatches - 1][1] for i in range(STEPS)]


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_warm_up_of_the_critic_takes_its_part_of_the_schedule(tmp_path, rates, kind):
    changes = {**RUN, "critic": {"kind": kind, "warmup_steps": 1}, "train.epochs": 2, "train.minibatches": 2, "optim.warmup_updates": 2}
    Trainer(tiny(changes), out=tmp_path / "run").run()
    assert [update for update, _ in rates["policy"]] == list(range(1 if kind == "head" else 5, 13))
    if kind == "model":
        assert [update for update, _ in rates["critic"]] == list(range(1, 13))
    for update, rate in rates["policy"]:
        assert rate == schedule(update, total=12, lr=1e-3, warmup_updates=2, kind="cosine", final_lr_frac=0.1)


def test_a_step_that_stops_early_or_has_few_rows_keeps_its_part_of_the_schedule(tmp_path, rates):
    changes = {**RUN, "critic": {"lr": 4e-3}, "train.epochs": 4, "algo.stop_at_kl_nats": 1e-9, "optim.lr": 1e-2}
    Trainer(tiny(changes), out=tmp_path / "run").run()
    assert [update for update, _ in rates["policy"]] == [1, 5, 9]
    assert [update for update, _ in rates["critic"]] == list(range(1, 13))
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert [row["train/lr"] for row in rows] == [rate for _, rate in rates["policy"]]
    for update, rate in rates["policy"]:
        assert rate == schedule(update, total=12, lr=1e-2, warmup_updates=2, kind="cosine", final_lr_frac=0.1)
    rates.clear()
    few = {
        **RUN, "algo.advantage": "standardize", "algo.truncated": "drop", "train.minibatches": 16, "sampling.max_new_tokens": 3,
    }
    Trainer(tiny(few), out=tmp_path / "few").run()
    made = [update for update, _ in rates["policy"]]
    assert 0 < len(made) < 16 * STEPS and made == sorted(made)
    for update, rate in rates["policy"]:
        assert rate == schedule(update, total=16 * STEPS, lr=1e-3, warmup_updates=2, kind="cosine", final_lr_frac=0.1)
