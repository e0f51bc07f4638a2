"""Corrections inside the update: T1 split, T2 poison, T3 nothing to correct, figures by hand, minibatches, interpolated prox."""

from __future__ import annotations

import inspect
import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from parts import CLIP, PLAIN, assert_same_gradients, gradients, on_policy, random_rows, state_of

from burnish.algorithms import corrections
from burnish.algorithms.penalties import KlController
from burnish.algorithms.reduce import rollout_mean, token_mean
from burnish.trainer import Algorithm, Correction, EntropyTerm, KlTerm, train_step
from burnish.trainer.columns import score_rows
from burnish.types import Batch, Row

BOUNDS = {"low": 0.8, "high": 1.25}
NARROW = {"geometric_mask": {"low": 0.97, "high": 1.03}}
CORRECTIONS = {
    name: partial(fn, **{n: v for n, v in NARROW.get(name, BOUNDS).items() if n in inspect.signature(fn).parameters})
    for name, fn in inspect.getmembers(corrections, inspect.isfunction)
    if not name.startswith("_") and fn.__module__ == corrections.__name__ and {"log_ratio", "mask"} <= set(inspect.signature(fn).parameters)
}
FORMS = [(normalize, denominator) for normalize in (False, True) for denominator in ("original", "kept")]
METRICS = ("train/correction_weight_mean", "train/correction_dropped_frac", "train/correction_ess_frac")

every_correction = pytest.mark.parametrize("name", CORRECTIONS)
every_form = pytest.mark.parametrize(("normalize", "denominator"), FORMS)


def algorithm(name, normalize, denominator, *, reduce=token_mean, rest=True):
    terms = {"kl": KlTerm("k3", "naive", KlController(0.1)), "entropy": EntropyTerm(0.02)} if rest else {}
    return Algorithm(CLIP, reduce, correction=Correction(CORRECTIONS[name], normalize, denominator), **terms)


def test_the_room_is_enumerated():
    assert {"token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"} <= CORRECTIONS.keys()


@pytest.fixture(scope="module")
def tiny_state(tiny_llama):
    return state_of(tiny_llama)


@pytest.fixture(scope="module")
def near(tiny_state):
    """Rows whose sampler was near the policy: some of the corrections' bounds are kept, some are not."""
    rng = random.Random(1)
    rows = on_policy(tiny_state, random_rows(7, ref=True)).rows
    return [r.put(logp_gen=tuple(v + rng.uniform(-0.3, 0.3) for v in r.columns["logp_gen"])) for r in rows]


@every_form
@every_correction
@pytest.mark.parametrize(("reduce", "minibatches"), [(token_mean, 1), (rollout_mean, 3)])
def test_any_split_gives_the_same_gradient_and_metrics(tiny_state, near, name, normalize, denominator, reduce, minibatches):
    batch = Batch(tuple(near))
    algo = algorithm(name, normalize, denominator, reduce=reduce)
    whole, metrics = gradients(tiny_state, batch, algo, minibatches=minibatches, tokens_per_micro_batch=100_000)
    for tokens in (1, 60):
        split, split_metrics = gradients(tiny_state, batch, algo, minibatches=minibatches, tokens_per_micro_batch=tokens)
        assert_same_gradients(split, whole)
        assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert 0 < metrics["train/correction_ess_frac"] < 1
    assert (0 < metrics["train/correction_dropped_frac"] < 1) == ("mask" in name)


@every_form
@every_correction
@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_what_stands_where_nothing_was_sampled_changes_nothing(tiny_state, near, name, normalize, denominator, poison):
    rows = near[:5]
    algo = algorithm(name, normalize, denominator)
    put = lambda row, values: tuple(v if m else poison for v, m in zip(values, row.mask, strict=True))  # noqa: E731
    dirty = [replace(row, columns={n: put(row, values) for n, values in row.columns.items()}) for row in rows]
    for minibatches in (1, 2):
        clean, clean_metrics = gradients(tiny_state, Batch(tuple(rows)), algo, minibatches=minibatches, tokens_per_micro_batch=50)
        other, other_metrics = gradients(tiny_state, Batch(tuple(dirty)), algo, minibatches=minibatches, tokens_per_micro_batch=50)
        assert all(torch.equal(a[n], b[n]) for a, b in zip(clean, other, strict=True) for n in a)
        assert clean_metrics == other_metrics


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1.0])
def test_an_advantage_where_nothing_was_sampled_is_no_signal(make_tiny, poison):
    state = state_of(make_tiny("llama"))
    rows = [replace(r, columns={**r.columns, "adv": tuple(0.0 if m else poison for m in r.mask)}) for r in random_rows(4)]
    train_step(state, Batch(tuple(rows)), Algorithm(CLIP, token_mean), sampling=PLAIN, lr_of=lambda u: 1e-3, clip_norm=1.0)
    assert (state.updates, state.version) == (1, 0)


@every_form
@every_correction
@pytest.mark.parametrize("minibatches", [1, 2])
def test_rollouts_of_the_policy_itself_have_weight_one(tiny_state, name, normalize, denominator, minibatches):
    batch = on_policy(tiny_state, random_rows(6))
    algo = algorithm(name, normalize, denominator, rest=False)
    with_it, metrics = gradients(tiny_state, batch, algo, minibatches=minibatches)
    without, _ = gradients(tiny_state, batch, replace(algo, correction=None), minibatches=minibatches)
    assert_same_gradients(with_it, without)
    assert [metrics[n] for n in METRICS] == pytest.approx([1, 0, 1], abs=1e-5)


RHO = ((0.4, 1.0, 3.0), (1.2, 1.5))
ADV = (1.0, -2.0)
# name, bounds -> the weights of the two rollouts; their products are 1.2 and 1.8, their geometric means 1.063 and 1.342
BY_HAND = [
    ("token_truncate", {"high": 2.0}, ((0.4, 1.0, 2.0), (1.2, 1.5)), ((1, 1, 1), (1, 1))),
    ("token_mask", {"low": 0.5, "high": 2.0}, ((0.0, 1.0, 0.0), (1.2, 1.5)), ((0, 1, 0), (1, 1))),
    ("sequence_truncate", {"high": 1.5}, ((1.2, 1.2, 1.2), (1.5, 1.5)), ((1, 1, 1), (1, 1))),
    ("sequence_mask", {"low": 0.5, "high": 1.5}, ((1.2, 1.2, 1.2), (0.0, 0.0)), ((1, 1, 1), (0, 0))),
    ("geometric_mask", {"low": 0.9, "high": 1.1}, ((0.4, 1.0, 3.0), (0.0, 0.0)), ((1, 1, 1), (0, 0))),
]


def rows_with(state, rho):
    """A row for each list of ratios prox / gen, with a prompt, and an environment's token in the middle."""
    rows = []
    for i, ratios in enumerate(rho):
        mask = (False, False, True, False, *(True,) * (len(ratios) - 1))
        rows.append(Row(tuple(5 + i + t for t in range(len(mask))), mask, {}, {"version": 0.0}).put(adv=ADV[i]))
    logp = score_rows(state.policy, rows, sampling=PLAIN, tokens_per_micro_batch=1000)
    out = []
    for row, values, ratios in zip(rows, logp, rho, strict=True):
        left = iter(ratios)
        out.append(row.put(logp_gen=tuple(v - math.log(next(left)) if m else 0.0 for v, m in zip(values, row.mask, strict=True))))
    return Batch(tuple(out))


@every_form
@pytest.mark.parametrize(("name", "bounds", "weights", "kept"), BY_HAND, ids=[b[0] for b in BY_HAND])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_loss_and_metrics_by_hand(tiny_state, name, bounds, weights, kept, normalize, denominator, minibatches):
    batch = rows_with(tiny_state, RHO)
    fn = partial(getattr(corrections, name), **bounds)
    flat = [w for row in weights for w in row]
    mean = sum(flat) / 5
    scale = 1 / mean if normalize else 1.0
    counted = kept if denominator == "kept" else ((1, 1, 1), (1, 1))
    # at ratio 1 the loss of a token is -A; weights of the whole step, counts of each update
    sums = [-adv * scale * sum(row) for adv, row in zip(ADV, weights, strict=True)]
    tokens = [sum(row) for row in counted]
    parts = [[0, 1]] if minibatches == 1 else [[0], [1]]
    by_token = [sum(sums[i] for i in p) / max(sum(tokens[i] for i in p), 1) for p in parts]
    by_rollout = [sum(sums[i] / max(tokens[i], 1) for i in p) / max(sum(tokens[i] > 0 for i in p), 1) for p in parts]
    for reduce, want in ((token_mean, by_token), (rollout_mean, by_rollout)):
        algo = Algorithm(CLIP, reduce, correction=Correction(fn, normalize, denominator))
        _, metrics = gradients(tiny_state, batch, algo, minibatches=minibatches, tokens_per_micro_batch=8)
        assert metrics["train/loss"] == pytest.approx(sum(want) / len(want), rel=1e-4)
        assert metrics["train/correction_weight_mean"] == pytest.approx(scale * mean, rel=1e-4)
        assert metrics["train/correction_dropped_frac"] == pytest.approx(1 - sum(map(sum, kept)) / 5)
        assert metrics["train/correction_ess_frac"] == pytest.approx(sum(flat) ** 2 / (5 * sum(w * w for w in flat)), rel=1e-4)
        assert metrics["train/tokens_count"] == 5
        if minibatches == 1:
            far = [rho - 1 - math.log(rho) for row in RHO for rho in row]
            assert metrics["train/kl_cur_gen_nats"] == pytest.approx(sum(far) / 5, rel=1e-4)


def test_the_kl_and_the_entropy_do_not_see_what_was_dropped(tiny_state, near):
    """A correction weighs the policy loss alone, whatever its denominator counts."""
    batch = Batch(tuple(near))
    plain = gradients(tiny_state, batch, replace(algorithm("token_mask", False, "kept"), correction=None))[1]
    for normalize, denominator in FORMS:
        found = gradients(tiny_state, batch, algorithm("token_mask", normalize, denominator))[1]
        for term in ("kl", "entropy"):
            assert found[f"train/loss_{term}"] == pytest.approx(plain[f"train/loss_{term}"], rel=1e-5)
        assert found["train/loss_policy"] != pytest.approx(plain["train/loss_policy"], rel=1e-2)
        assert found["train/kl_cur_gen_nats"] == pytest.approx(plain["train/kl_cur_gen_nats"], rel=1e-5)


def test_a_step_of_which_everything_is_dropped_changes_nothing_and_says_so(make_tiny):
    state = state_of(make_tiny("llama"))
    for normalize, denominator in FORMS:
        correction = Correction(partial(corrections.token_mask, low=5.0, high=6.0), normalize, denominator)
        found, metrics = gradients(state, on_policy(state, random_rows(4)), Algorithm(CLIP, token_mean, correction=correction))
        assert all(float(g.abs().max()) == 0 for g in found[0].values())
        assert [metrics[n] for n in METRICS] == [0, 1, 0]


@pytest.mark.parametrize("form", FORMS)
def test_a_token_that_was_dropped_may_have_an_infinite_ratio(tiny_state, form):
    """To the sampler, and to a prox that was given with the row: 0 times infinity is no number."""
    rows = [r.put(adv=-1.0) for r in on_policy(tiny_state, random_rows(4)).rows]
    far = tuple(-1e4 if m else 0.0 for m in rows[0].mask)
    share = rows[0].num_tokens / sum(r.num_tokens for r in rows)
    for bad in [rows[0].put(logp_gen=far)] + ([rows[0].put(logp_prox=far)] if form == FORMS[0] else []):
        algo = algorithm("token_mask", *form, rest=False)
        found, metrics = gradients(tiny_state, Batch((bad, *rows[1:])), algo, tokens_per_micro_batch=1)
        assert all(bool(torch.isfinite(g).all()) for g in found[0].values())
        assert metrics["train/correction_dropped_frac"] == pytest.approx(share)


# where prox comes from

def watched(*, correction=None, **values):
    """An algorithm that notes the columns of each micro-batch that its loss is asked for."""
    seen = []

    def loss(logp_cur, logp_prox, logp_gen, adv):
        seen.append({"cur": logp_cur.detach().clone(), "prox": logp_prox.clone(), "gen": logp_gen.clone()})
        return CLIP(logp_cur, logp_prox, adv)

    return Algorithm(loss, token_mean, correction=correction, **values), seen


@pytest.mark.parametrize(("epochs", "minibatches"), [(3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_are_those_at_the_start_of_the_step(make_tiny, epochs, minibatches, normalize):
    state = state_of(make_tiny("llama"))
    rows = random_rows(6)
    start = score_rows(state.policy, rows, sampling=PLAIN, tokens_per_micro_batch=10_000)
    seen = []

    def loss(logp_cur, weight, logp_prox, logp_gen, mask):
        seen.append((weight.clone(), logp_prox - logp_gen, mask.clone()))
        return -logp_cur

    def correction(log_ratio, mask):
        return torch.where(mask, log_ratio.exp(), 0.0), mask

    algo = Algorithm(loss, token_mean, correction=Correction(correction, normalize, "kept"))
    train_step(
        state, Batch(tuple(r.put(adv=1.0) for r in rows)), algo, sampling=PLAIN, lr_of=lambda u: 1e-2, clip_norm=1.0, epochs=epochs,
        minibatches=minibatches,
    )
    assert state.version == epochs * minibatches
    rho = sorted(
        math.exp(s - g) for row, values in zip(rows, start, strict=True)
        for s, g, m in zip(values, row.columns["logp_gen"], row.mask, strict=True) if m
    )
    scale = len(rho) / sum(rho) if normalize else 1.0
    for epoch in range(epochs):
        part = seen[epoch * minibatches : (epoch + 1) * minibatches]
        weights = sorted(float(w) for weight, _, mask in part for w in weight[mask])
        assert weights == pytest.approx([scale * r for r in rho], rel=1e-4)
        again = sorted(float(x) for _, ratio, mask in part for x in ratio[mask].exp())
        assert again == pytest.approx(rho, rel=1e-4)


def test_prox_gen_takes_ratios_to_the_sampler(make_tiny):
    state = state_of(make_tiny("llama"))
    algo, seen = watched(prox="gen")
    train_step(state, Batch(tuple(random_rows(5))), algo, sampling=PLAIN, lr_of=lambda u: 1e-2, clip_norm=1.0, epochs=2, minibatches=2)
    assert len(seen) == 4 and all(torch.equal(one["prox"], one["gen"]) for one in seen)


@pytest.mark.parametrize("start", [0, 5])
def test_interpolated_prox_stands_where_the_step_began(make_tiny, start):
    """alpha = (start - v) / (now - v): the policy itself before the first update, then a point on the way from the sampler to it."""
    state = state_of(make_tiny("llama"))
    state.version = start
    ages = (0, 1, 4)
    rows = [replace(r, numbers={"version": float(start - a)}).put(adv=1.0) for r, a in zip(random_rows(3), ages, strict=True)]
    algo, seen = watched(prox="interpolated")
    train_step(state, Batch(tuple(rows)), algo, sampling=PLAIN, lr_of=lambda u: 1e-2, clip_norm=1.0, epochs=3, tokens_per_micro_batch=1)
    order = sorted(range(3), key=lambda i: (-len(rows[i].tokens), i))
    for made in range(3):
        for place, i in enumerate(order):
            one, age = seen[made * 3 + place], ages[i]
            alpha = age / (age + made) if age else 0.0
            torch.testing.assert_close(one["prox"], one["gen"] + alpha * (one["cur"] - one["gen"]))
            if made == 0 and age:
                assert torch.equal(one["prox"], one["cur"])


def test_interpolation_comes_near_to_scoring(make_tiny):
    """After some updates at once the interpolated prox of stale rollouts is nearer to the true one than the sampler is."""
    state = state_of(make_tiny("llama"))
    move = {"sampling": PLAIN, "lr_of": lambda u: 3e-3, "clip_norm": 1.0}
    rows = [r.put(adv=1.0) for r in random_rows(6)]
    stale = list(on_policy(state, rows).rows)
    for _ in range(4):
        train_step(state, on_policy(state, rows), Algorithm(CLIP, token_mean), **move)
    true = score_rows(state.policy, rows, sampling=PLAIN, tokens_per_micro_batch=10_000)
    algo, seen = watched(prox="interpolated")
    train_step(state, Batch(tuple(stale)), algo, epochs=3, tokens_per_micro_batch=1, **move)
    order = sorted(range(6), key=lambda i: (-len(rows[i].tokens), i))
    for made in (1, 2):
        near = far = 0.0
        for place, i in enumerate(order):
            one = seen[made * 6 + place]
            want = torch.tensor([true[i]])
            near, far = near + float((one["prox"] - want).abs().sum()), far + float((one["gen"] - want).abs().sum())
        assert near < 0.5 * far


def test_interpolation_and_a_look_ahead_exclude_each_other():
    for normalize, denominator in FORMS[1:]:
        with pytest.raises(ValueError, match="use prox scored"):
            Algorithm(CLIP, token_mean, correction=Correction(CORRECTIONS["token_mask"], normalize, denominator), prox="interpolated")
