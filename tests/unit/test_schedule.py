"""T24: the learning rate at the first, half-way and last update, for every shape of run."""

from __future__ import annotations

import math

import pytest
from parts import GRPO, PLAIN, on_policy, random_rows, state_of

from burnish.trainer import schedule, train_step


def lr(update, *, total=100, warmup=0, kind="constant", final=0.0):
    return schedule(update, total=total, lr=2.0, warmup_updates=warmup, kind=kind, final_lr_frac=final)


def test_constant():
    assert [lr(u) for u in (1, 50, 100)] == [2.0, 2.0, 2.0]


def test_warm_up_reaches_lr_at_its_last_update():
    assert [lr(u, warmup=10) for u in (1, 5, 10, 11, 100)] == pytest.approx([0.2, 1.0, 2.0, 2.0, 2.0])


def test_linear_and_cosine_end_at_their_share():
    assert [lr(u, kind="linear") for u in (1, 50, 100)] == pytest.approx([1.98, 1.0, 0.0])
    assert [lr(u, kind="linear", final=0.1) for u in (50, 100)] == pytest.approx([2 * 0.55, 0.2])
    assert [lr(u, kind="cosine") for u in (50, 100)] == pytest.approx([1.0, 0.0])
    assert lr(25, kind="cosine", final=0.5) == pytest.approx(2 * (0.5 + 0.5 * 0.5 * (1 + math.cos(math.pi / 4))))
    assert [lr(u, kind="cosine", warmup=20) for u in (20, 60, 100)] == pytest.approx([2.0, 1.0, 0.0])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [100, 1000])
def test_a_warm_up_as_long_as_the_run_only_warms_up(kind, warmup):
    values = [lr(u, kind=kind, warmup=warmup) for u in range(1, 101)]
    assert values == pytest.approx([2.0 * u / warmup for u in range(1, 101)])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_one_update(kind):
    assert lr(1, total=1, kind=kind) == pytest.approx(2.0 if kind == "constant" else 0.0)
    assert lr(1, total=1, kind=kind, warmup=1) == 2.0


@pytest.mark.parametrize("update", [0, 101])
def test_an_update_outside_the_run_is_an_error(update):
    with pytest.raises(ValueError, match=r"not in 1\.\.100"):
        lr(update)


@pytest.mark.parametrize(("epochs", "minibatches", "rows"), [(1, 1, 6), (2, 1, 6), (1, 3, 6), (2, 3, 6), (2, 4, 2), (3, 2, 0)])
def test_every_optimizer_step_gets_the_rate_of_its_number(make_tiny, epochs, minibatches, rows):
    """Also where minibatches are empty or the batch is: the schedule belongs to the step, not to how much was kept."""
    steps, used = 3, []
    state = state_of(make_tiny("llama"))
    optimizer_step = state.optimizer.step
    state.optimizer.step = lambda: (used.append((state.updates, state.optimizer.param_groups[0]["lr"])), optimizer_step())
    total = steps * epochs * minibatches
    for _ in range(steps):
        batch = on_policy(state, random_rows(rows))
        train_step(
            state, batch, GRPO, sampling=PLAIN, clip_norm=1.0, epochs=epochs, minibatches=minibatches,
            lr_of=lambda u: schedule(u, total=total, lr=1e-3, warmup_updates=2, kind="cosine", final_lr_frac=0.1),
        )
    assert state.updates == total
    for update, rate in used:
        assert rate == schedule(update, total=total, lr=1e-3, warmup_updates=2, kind="cosine", final_lr_frac=0.1)
    if rows >= minibatches:
        assert [u for u, _ in used] == list(range(1, total + 1))
