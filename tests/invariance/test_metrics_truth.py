"""T21: a metric is the value worked out over everything, however the step was split; and a number that is none stays visible."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
from parts import CLIP, PLAIN, random_rows, state_of

from burnish.algorithms.corrections import token_mask
from burnish.algorithms.penalties import KlController
from burnish.algorithms.reduce import token_mean
from burnish.algorithms.value_losses import clipped_error
from burnish.models.heads import add_value_head
from burnish.monitor.metrics import METRICS
from burnish.monitor.writer import MetricsWriter, read_metrics
from burnish.trainer import Algorithm, Correction, EntropyTerm, KlTerm, ValueTerm, train_step
from burnish.trainer.columns import score_rows
from burnish.types import Batch, Row

LOW, HIGH = 0.8, 1.3
WHOLE = Algorithm(
    CLIP, token_mean, kl=KlTerm("k3", "naive", KlController(0.1)), correction=Correction(partial(token_mask, low=LOW, high=HIGH)),
    entropy=EntropyTerm(0.01), value=ValueTerm(partial(clipped_error, clip=0.2), 0.5),
)


def rows_with_values() -> list[Row]:
    rows = random_rows(9, ref=True)
    return [r.put(value_prox=0.1 * i, ret=0.3 - 0.1 * i) for i, r in enumerate(rows)]


def step_metrics(make_tiny, *, tokens: int, **values) -> dict[str, float]:
    loaded = make_tiny("llama")
    add_value_head(loaded.module)
    return train_step(
        state_of(loaded), Batch(tuple(rows_with_values())), WHOLE, sampling=PLAIN, lr_of=lambda u: 1e-3, clip_norm=1.0,
        tokens_per_micro_batch=tokens, **values,
    )


@pytest.mark.parametrize("values", [{}, {"epochs": 2, "minibatches": 3}], ids=["one update", "six"])
def test_metrics_do_not_depend_on_the_split(make_tiny, values):
    """Rows are of unequal length, so a mean of the micro-batches' means is another number."""
    whole = step_metrics(make_tiny, tokens=10_000, **values)
    assert len(whole) > 15
    for tokens in (90, 40, 1):
        split = step_metrics(make_tiny, tokens=tokens, **values)
        assert split == {name: pytest.approx(value, rel=2e-4, abs=1e-6) for name, value in whole.items()}


def test_the_sums_of_weights_are_those_of_all_tokens(make_tiny):
    """The effective sample size is a ratio of sums, which no mean over micro-batches gives."""
    loaded, rows = make_tiny("llama"), rows_with_values()
    logp = score_rows(state_of(loaded).policy, rows, sampling=PLAIN, tokens_per_micro_batch=10_000)
    pairs = [(a - b, m) for lp, r in zip(logp, rows, strict=True) for a, b, m in zip(lp, r.columns["logp_gen"], r.mask, strict=True)]
    ratio = torch.tensor([x for x, m in pairs if m], dtype=torch.float64).exp()
    weight = torch.where((ratio >= LOW) & (ratio <= HIGH), ratio, 0.0)
    found = step_metrics(make_tiny, tokens=40)
    assert 0 < found["train/correction_dropped_frac"] < 1
    assert found["train/correction_dropped_frac"] == pytest.approx(float((weight == 0).double().mean()), abs=1e-9)
    assert found["train/correction_weight_mean"] == pytest.approx(float(weight.mean()), rel=1e-5)
    assert found["train/correction_ess_frac"] == pytest.approx(float(weight.sum() ** 2 / (weight**2).sum() / len(weight)), rel=1e-5)


def test_the_terms_of_a_loss_add_up_to_it(make_tiny):
    found = step_metrics(make_tiny, tokens=40)
    terms = {name.removeprefix("train/loss_"): value for name, value in found.items() if name.startswith("train/loss_")}
    assert set(terms) == {"policy", "kl", "entropy", "value"}
    assert sum(terms.values()) == pytest.approx(found["train/loss"], rel=1e-6)
    assert terms["entropy"] == pytest.approx(-0.01 * found["train/entropy_nats"], rel=1e-5)
    assert terms["kl"] == pytest.approx(0.1 * found["train/kl_cur_ref_nats"], rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_stays_visible(tmp_path, bad):
    """It must not enter the file as a number."""
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": bad, "train/entropy_nats": 2.0})
    assert read_metrics(tmp_path) == [{"step": 1, "train/entropy_nats": 2.0, "not_finite": ["train/loss"]}]
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)


def test_every_metric_is_declared_once_with_a_unit_in_its_name():
    units = {"frac": "frac", "nats": "nats", "tokens": "tokens", "s": "s", "count": "count", "tokens/s": "tokens_per_s", "GiB": "gib"}
    for name, declared in METRICS.items():
        assert name == declared.name and declared.meaning
        if declared.unit:
            assert units[declared.unit] in name, name
