"""Reward models: T1 split, T2 poison and padding, T3 lr 0, T4 solo and batch, T8 a head of zeros, T15 it trains, T16 not finite.

Over all losses of the room, each with the rows of its kind.
"""

from __future__ import annotations

import inspect
import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import TINY, tiny_settings
from parts import PLAIN, weights_of

from burnish.algorithms import reduce, reward_losses
from burnish.config import Lora
from burnish.models.heads import Scorer, add_thresholds
from burnish.models.load import load_scorer
from burnish.plan.reward_models import COLUMNS, kind_of_loss
from burnish.ref import Ref
from burnish.trainer import ClassScores, NonFiniteError, PairScores, RatedScores, StepScores, make_state, measure_scores, train_step
from burnish.trainer.columns import score_rows
from burnish.trainer.objective import Counts, Tally
from burnish.types import Batch, Row

ONE = {"sampling": PLAIN, "lr_of": lambda u: 1e-3, "clip_norm": 1.0}
BESIDE = {"centering", "prefers_chosen"}        # not losses of their own
LOSSES = {
    name: kind_of_loss(Ref(name)) for name, fn in inspect.getmembers(reward_losses, inspect.isfunction)
    if fn.__module__ == reward_losses.__name__ and not name.startswith("_") and name not in BESIDE
}
CLASSES, OUTPUTS = 4, 3
CASES = [(name, variant) for name, kind in LOSSES.items() for variant in {
    "pairs": ("plain", "centered"), "ratings": ("one", "several"), "classes": ("plain",), "steps": ("token_mean", "rollout_mean"),
}[kind]]


def make(name: str, variant: str, *, model: str = "llama", lora: Lora | None = None, dtype: str = "float32", head: bool = True):
    """State and objective of one loss; with `head` the scores are no longer 0."""
    kind = LOSSES[name]
    outputs = {"steps": CLASSES, "ratings": OUTPUTS if variant == "several" else 1}.get(kind, 1)
    loaded = load_scorer(tiny_settings(model, lora=lora), seed=0, outputs=outputs)
    if kind == "classes":
        add_thresholds(loaded.module, classes=CLASSES)
    if head:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            torch.nn.init.normal_(Scorer(loaded.module).head.weight, std=0.3)
    state = make_state(loaded.module, kind=Scorer, dtype=dtype)
    loss = getattr(reward_losses, name)
    objective = {
        "pairs": lambda: PairScores(loss, 0.1 if variant == "centered" else 0.0), "ratings": lambda: RatedScores(loss, outputs),
        "classes": lambda: ClassScores(loss, state.policy.thresholds), "steps": lambda: StepScores(loss, getattr(reduce, variant, None)),
    }[kind]()
    return state, objective


def batch_of(name: str, variant: str, num: int = 10, seed: int = 0) -> Batch:
    rng, kind, rows = random.Random(seed), LOSSES[name], []
    for i in range(num):
        length = rng.randint(2, 24)
        tokens = tuple(rng.randrange(2, 60) for _ in range(length))
        mask = tuple(at == length - 1 for at in range(length))
        numbers: dict[str, float] = {}
        columns = {}
        if kind == "pairs":
            numbers["margin"] = rng.uniform(0, 0.5)
        elif kind == "classes":
            numbers["label"] = float(rng.randrange(CLASSES))
        elif kind == "ratings":
            count = OUTPUTS if variant == "several" else 1
            known = [rng.random() < 0.6 or k == i % count for k in range(count)]
            numbers = {f"rating_{k}": rng.uniform(-2, 2) * known[k] for k in range(count)}
            numbers |= {f"known_{k}": float(known[k]) for k in range(count)} | {"num_ratings": float(sum(known))}
        else:
            mask = tuple(at == length - 1 or rng.random() < 0.3 for at in range(length))
            columns["label"] = tuple(float(rng.randrange(CLASSES)) if m else 0.0 for m in mask)
        rows.append(Row(tokens, mask, columns, numbers))
    return Batch(tuple(rows), 2 if kind == "pairs" else 1)


def gradient(state, batch, objective, *, tokens, monkeypatch):
    caught = {}
    monkeypatch.setattr("burnish.trainer.step._apply", lambda state, finite, tally, **_: caught.update(
        {n: m.grad.clone() for n, m in state.weights.masters.items() if m.grad is not None}))
    metrics = train_step(state, batch, objective, tokens_per_micro_batch=tokens, **ONE)
    state.weights.clear_grads()
    return caught, metrics


def test_the_room_is_enumerated():
    assert set(LOSSES.values()) == set(COLUMNS)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_any_split_gives_the_same_gradient_and_metrics(name, variant, monkeypatch):
    state, objective = make(name, variant)
    batch = batch_of(name, variant)
    whole, metrics = gradient(state, batch, objective, tokens=100_000, monkeypatch=monkeypatch)
    assert ("thresholds.first_and_log_gaps" in whole) == (LOSSES[name] == "classes")
    largest = max(float(g.abs().max()) for g in whole.values())
    assert largest > 1e-4
    for tokens in (1, 60):
        split, split_metrics = gradient(state, batch, objective, tokens=tokens, monkeypatch=monkeypatch)
        for n in whole:
            torch.testing.assert_close(split[n], whole[n], rtol=1e-4, atol=1e-5 * largest, msg=n)
        assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    held_out = [measure_scores(state.policy, batch, objective, tokens_per_micro_batch=tokens) for tokens in (1, 60, 100_000)]
    for measured in held_out:
        assert measured["eval/loss"] == pytest.approx(metrics["train/loss"], rel=1e-5)
        assert measured == pytest.approx(held_out[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_what_stands_beside_the_scored_tokens_changes_nothing(name, variant, poison, monkeypatch):
    """Columns outside the mask, and ratings that are not known."""
    state, objective = make(name, variant)
    batch = batch_of(name, variant)

    def dirty(row):
        columns = {n: tuple(v if m else poison for v, m in zip(values, row.mask, strict=True)) for n, values in row.columns.items()}
        unknown = [n.replace("known", "rating") for n, v in row.numbers.items() if n.startswith("known") and not v]
        return replace(row, columns=columns, numbers={**row.numbers, **dict.fromkeys(unknown, poison)})

    clean, clean_metrics = gradient(state, batch, objective, tokens=60, monkeypatch=monkeypatch)
    other = replace(batch, rows=tuple(dirty(row) for row in batch.rows))
    if LOSSES[name] in ("steps",) or variant == "several":
        assert other != batch
    poisoned, metrics = gradient(state, other, objective, tokens=60, monkeypatch=monkeypatch)
    assert all(torch.equal(clean[n], poisoned[n]) for n in clean)
    assert metrics == clean_metrics


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_row_order_does_not_matter(name, variant, monkeypatch):
    state, objective = make(name, variant)
    batch = batch_of(name, variant)
    size = batch.rows_per_unit
    turned = tuple(row for at in reversed(range(0, len(batch.rows), size)) for row in batch.rows[at : at + size])
    one, _ = gradient(state, batch, objective, tokens=60, monkeypatch=monkeypatch)
    other, _ = gradient(state, replace(batch, rows=turned), objective, tokens=60, monkeypatch=monkeypatch)
    for n in one:
        torch.testing.assert_close(one[n], other[n], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_lr_zero_stays_where_it_is(name, variant, dtype):
    state, objective = make(name, variant, dtype=dtype)
    before, batch = weights_of(state), batch_of(name, variant)
    losses = {train_step(state, batch, objective, sampling=PLAIN, lr_of=lambda u: 0.0, clip_norm=1.0)["train/loss"] for _ in range(5)}
    assert len(losses) == 1
    assert all(torch.equal(before[n], m) for n, m in state.weights.masters.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_steps_lower_the_loss_and_move_every_kind_of_weight(name, variant, lora, dtype):
    state, objective = make(name, variant, lora=lora, dtype=dtype, head=False)
    before, batch = weights_of(state), batch_of(name, variant)
    first = train_step(state, batch, objective, **ONE)
    for _ in range(8):
        last = train_step(state, batch, objective, **ONE)
    assert 0 < first["train/grad_norm"] < math.inf
    assert last["train/loss"] < first["train/loss"]
    moved = {n for n, m in state.weights.masters.items() if not torch.equal(before[n], m)}
    assert any("score" in n for n in moved)
    assert any("layers" in n for n in moved)
    assert any("thresholds" in n for n in moved) == (LOSSES[name] == "classes")


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_a_head_of_zeros_gives_ln_2_or_ln_of_the_classes(model, adapted):
    experts = {"num_experts", "num_local_experts"} & TINY[model][1].keys()      # whose layers take no dropout
    lora = Lora(rank=4, dropout=0.0 if experts else 0.2) if adapted else None
    for (name, variant), expected in (
        (("bradley_terry", "centered"), math.log(2)), (("ordinal", "plain"), math.log(CLASSES)),
        (("step_cross_entropy", "token_mean"), math.log(CLASSES)), (("step_cross_entropy", "rollout_mean"), math.log(CLASSES)),
    ):
        state, objective = make(name, variant, model=model, lora=lora, head=False)
        batch = batch_of(name, variant)
        if name == "bradley_terry":
            batch = replace(batch, rows=tuple(replace(row, numbers={"margin": 0.0}) for row in batch.rows))
        metrics = train_step(state, batch, objective, sampling=PLAIN, lr_of=lambda u: 0.0, clip_norm=1.0, dropout=adapted)
        assert metrics["train/loss"] == pytest.approx(expected, abs=1e-6)
        if name == "bradley_terry":
            assert metrics["train/preference_accuracy_frac"] == 0.5


@pytest.mark.parametrize("model", TINY)
def test_a_row_scores_the_same_alone_and_with_others(model):
    state, _ = make("bradley_terry", "plain", model=model)
    rows = batch_of("bradley_terry", "plain").rows
    together = score_rows(state.policy, rows, sampling=PLAIN, tokens_per_micro_batch=10_000, column="score_cur")
    alone = [score_rows(state.policy, [r], sampling=PLAIN, tokens_per_micro_batch=1, column="score_cur")[0] for r in rows]
    assert len({scores[-1] for scores in alone}) > 1
    for a, b in zip(together, alone, strict=True):
        assert a == pytest.approx(b, abs=2e-5)


@pytest.mark.parametrize("model", TINY)
def test_scores_equal_those_of_the_plain_forward(model):
    state, _ = make("bradley_terry", "plain", model=model)
    for row in batch_of("bradley_terry", "plain", num=4).rows:
        (got,) = score_rows(state.policy, [row], sampling=PLAIN, tokens_per_micro_batch=100, column="score_cur")
        with torch.no_grad():
            own = state.policy.module(torch.tensor([row.tokens]), attention_mask=torch.ones(1, len(row.tokens))).logits
        assert got[-1] == pytest.approx(float(own[0, 0]), abs=1e-5)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_step_that_is_not_finite_is_skipped_and_the_run_stops_after_k(name, variant):
    state, objective = make(name, variant)
    batch = batch_of(name, variant)
    train_step(state, batch, objective, **ONE)
    with torch.no_grad():
        state.weights.masters["score.weight"][0, 5] = math.nan
    before = weights_of(state)
    for _ in range(2):
        assert train_step(state, batch, objective, max_skipped=3, **ONE)["train/skipped_updates_count"] == 1
    with pytest.raises(NonFiniteError, match="is not finite, now for 3 updates in a row"):
        train_step(state, batch, objective, max_skipped=3, **ONE)
    assert all(torch.equal(before[n].nan_to_num(), m.nan_to_num()) for n, m in state.weights.masters.items())


def test_metrics_by_hand():
    """Two pairs, of which one is in order; a rating off by 0.5 and one that is not known."""
    pairs = {"score_cur": torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, -1.0], [0.0, 3.0]]), "margin": torch.zeros(4)}
    pairs["mask"] = pairs["score_cur"] != 0
    tally = Tally()
    PairScores(reward_losses.bradley_terry).measure(pairs, tally)
    assert tally.values() == {
        "train/score_chosen_mean": 0.5, "train/score_rejected_mean": 2.0, "train/preference_accuracy_frac": 0.5,
    }
    rated = {
        "score_cur": torch.tensor([[[1.5, 4.0]]]), "mask": torch.tensor([[True]]), "rating_0": torch.tensor([1.0]),
        "rating_1": torch.tensor([0.0]), "known_0": torch.tensor([1.0]), "known_1": torch.tensor([0.0]),
    }
    objective, tally = RatedScores(reward_losses.squared_error, 2), Tally()
    objective.measure(rated, tally)
    assert tally.values() == {"train/rating_error_mean": 0.5, "train/score_mean": 1.5}
    counts = Counts(1, 1, 1, (1,), totals={"num_ratings": 1.0})
    assert float(objective.terms(rated, counts)["rating"]) == 0.25


def test_a_loss_that_takes_a_mean_is_refused_with_its_shape(monkeypatch):
    state, _ = make("bradley_terry", "plain")
    mean = lambda score_chosen, score_rejected: (score_rejected - score_chosen).mean()  # noqa: E731
    with pytest.raises(ValueError, match=r"returned the shape \(\) where \(5,\) are scored"):
        train_step(state, batch_of("bradley_terry", "plain"), PairScores(mean), tokens_per_micro_batch=100_000, **ONE)


def test_a_margin_in_the_recipe_takes_the_place_of_those_of_the_data(monkeypatch):
    state, _ = make("bradley_terry", "plain")
    batch = batch_of("bradley_terry", "plain")
    none = replace(batch, rows=tuple(replace(row, numbers={"margin": 0.0}) for row in batch.rows))
    without = PairScores(partial(reward_losses.bradley_terry, margin=None))
    one, _ = gradient(state, batch, without, tokens=1000, monkeypatch=monkeypatch)
    other, _ = gradient(state, none, PairScores(reward_losses.bradley_terry), tokens=1000, monkeypatch=monkeypatch)
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_a_loss_of_ones_own_meets_no_rating_that_is_not_known(monkeypatch):
    """It need not mask by itself: neither value nor gradient comes from what stands there."""
    state, _ = make("squared_error", "several")
    batch = batch_of("squared_error", "several")
    unknown = [dict.fromkeys((n.replace("known", "rating") for n, v in row.numbers.items() if n.startswith("known") and not v), math.nan)
               for row in batch.rows]
    rows = tuple(replace(row, numbers={**row.numbers, **bad}) for row, bad in zip(batch.rows, unknown, strict=True))
    poisoned = replace(batch, rows=rows)
    objective = RatedScores(lambda score, target: (score - target) ** 4, OUTPUTS)
    clean, _ = gradient(state, batch, objective, tokens=60, monkeypatch=monkeypatch)
    dirty, _ = gradient(state, poisoned, objective, tokens=60, monkeypatch=monkeypatch)
    assert any(unknown) and all(torch.equal(clean[n], dirty[n]) for n in clean)
