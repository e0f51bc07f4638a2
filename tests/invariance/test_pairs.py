"""Preference objectives over the whole room of losses: T1 split, T2 poison, T3 lr 0, T8 step 0, T15 it trains, T16 not finite, metrics."""

from __future__ import annotations

import inspect
import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from parts import PLAIN, assert_same_gradients, gradients, state_of, weights_of

from burnish.algorithms import preference_losses as room
from burnish.algorithms.preference_losses import nll
from burnish.algorithms.preference_terms import RunningReward
from burnish.config import Lora
from burnish.trainer import PAIR_COLUMNS, SINGLE_COLUMNS, LossTerm, NonFiniteError, PairObjective, Reference, SingleObjective, train_step
from burnish.trainer.columns import score_rows
from burnish.types import Batch, Row

VALUES = {
    "beta": 0.3, "label_smoothing": 0.1, "delta": 0.2, "tau": 0.05, "gamma": 0.5, "length_normalize": False, "normalization": "token_mean",
    "desirable_weight": 1.0, "undesirable_weight": 1.3,
}
ONE = {"sampling": PLAIN, "lr_of": lambda u: 1e-3, "clip_norm": 1.0}


def functions_of(columns, mark):
    """Each public loss that names `mark`, with values for what it needs beyond the columns."""
    for name, fn in inspect.getmembers(room, inspect.isfunction):
        names = inspect.signature(fn).parameters
        if not name.startswith("_") and fn.__module__ == room.__name__ and mark in names:
            needs = [n for n, p in names.items() if p.default is p.empty and n not in columns]
            yield name, partial(fn, **{n: VALUES[n] for n in needs})


SIGMOID = LossTerm("sigmoid", partial(room.sigmoid, beta=0.1))


def likelihood(normalization, weight=1.0):
    return LossTerm("nll", partial(nll, normalization=normalization), weight)


PAIRS = {name: PairObjective((LossTerm(name, fn),)) for name, fn in functions_of(PAIR_COLUMNS, "cur_chosen")}
SINGLES = {name: SingleObjective((LossTerm(name, fn),)) for name, fn in functions_of(SINGLE_COLUMNS, "cur")}
MIXED = {
    "mixture": PairObjective((SIGMOID, LossTerm("ipo", partial(room.ipo, beta=0.5, length_normalize=True), 0.3))),
    "rpo": PairObjective((SIGMOID,), likelihood("token_mean", 0.5)),
    "ld": PairObjective((SIGMOID,), likelihood("example_mean"), length_alpha=0.3),
    "wpo": PairObjective((SIGMOID,), likelihood("sequence_sum"), weigh_by_policy=True),
    "aot+nll": PairObjective((LossTerm("aot", partial(room.aot, beta=0.3)), SIGMOID), likelihood("token_mean")),
    "bco-running": PairObjective((LossTerm("bco_pair", partial(room.bco_pair, beta=0.3)),), running=RunningReward(0.7, 3)),
    "no reference": PairObjective((SIGMOID,), with_reference=False),
}
ALL = {**PAIRS, **MIXED, **SINGLES}
every = pytest.mark.parametrize("name", ALL)
REFERENCE_FREE = {"slic", "cpo", "simpo", "orpo", "nll", "no reference"}


def random_units(num: int = 5, *, seed: int = 0) -> Batch:
    """Units of two rows of unequal lengths, with holes in the mask and reference log-probs near those of a random model."""
    rng = random.Random(seed)
    rows = []
    for unit in range(num):
        prompt = [rng.randrange(2, 60) for _ in range(rng.randint(1, 6))]
        for _ in range(2):
            mask = [False] * len(prompt) + [True] + [rng.random() > 0.2 for _ in range(rng.randint(1, 16))]
            tokens = prompt + [rng.randrange(2, 60) for _ in range(len(mask) - len(prompt))]
            row = Row(tuple(tokens), tuple(mask), numbers={"wanted": float(unit % 2)})
            rows.append(row.put(logp_ref=tuple(-4.1 + rng.uniform(-0.5, 0.5) if m else 0.0 for m in mask)))
    return Batch(tuple(rows), rows_per_unit=2)


def at_start(state, batch: Batch, *, reference=None) -> Batch:
    """The rows with the log-probs of the reference, or of the policy as it is now."""
    sized = {"sampling": PLAIN, "tokens_per_micro_batch": 10_000}
    logp = reference.score(batch.rows, **sized) if reference else score_rows(state.policy, batch.rows, **sized)
    return replace(batch, rows=tuple(row.put(logp_ref=lp) for row, lp in zip(batch.rows, logp, strict=True)))


def sums(state, batch: Batch) -> list[float]:
    return [math.fsum(lp) for lp in score_rows(state.policy, batch.rows, sampling=PLAIN, tokens_per_micro_batch=10_000)]


def test_the_room_is_enumerated():
    assert {"sigmoid", "ipo", "aot", "orpo", "simpo", "bco_pair", "nll"} <= PAIRS.keys()
    assert {"kto"} == SINGLES.keys()
    assert {name for name, o in ALL.items() if o.coupled} == {"aot", "aot_unpaired", "aot+nll", "kto"}
    assert {name for name, o in ALL.items() if not o.needs_reference} == REFERENCE_FREE
    assert all(("logp_ref" in o.needs) == o.needs_reference for o in ALL.values())


@every
def test_any_split_gives_the_same_gradient(tiny_llama, name):
    state, batch = state_of(tiny_llama), random_units()
    whole, metrics = gradients(state, batch, ALL[name], tokens_per_micro_batch=100_000)
    assert any(float(g.abs().max()) > 0 for g in whole[0].values())
    for tokens in (1, 70):
        split, split_metrics = gradients(state, batch, ALL[name], tokens_per_micro_batch=tokens)
        assert_same_gradients(split, whole)
        assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@every
def test_the_order_of_units_does_not_matter(tiny_llama, name):
    state, batch = state_of(tiny_llama), random_units()
    turned = tuple(row for at in range(8, -1, -2) for row in batch.rows[at : at + 2])
    one, _ = gradients(state, batch, ALL[name], tokens_per_micro_batch=70)
    other, _ = gradients(state, replace(batch, rows=turned), ALL[name], tokens_per_micro_batch=70)
    assert_same_gradients(one, other)


@every
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_what_stands_where_nothing_is_learned_changes_nothing(tiny_llama, name, poison):
    state, batch = state_of(tiny_llama), random_units()
    dirty = [
        replace(row, columns={n: tuple(v if m else poison for v, m in zip(c, row.mask, strict=True)) for n, c in row.columns.items()})
        for row in batch.rows
    ]
    clean = gradients(state, batch, ALL[name], tokens_per_micro_batch=70)
    other = gradients(state, replace(batch, rows=tuple(dirty)), ALL[name], tokens_per_micro_batch=70)
    assert all(torch.equal(clean[0][0][n], other[0][0][n]) for n in clean[0][0])
    assert clean[1] == other[1]


def expected_logp(loaded, row) -> float:
    """sum over the row's tokens of log sum_v p(v)^2, by the plain forward."""
    with torch.no_grad():
        logp = loaded.module(torch.tensor([row.tokens])).logits[0].double().log_softmax(-1)
    return sum(float((2 * logp[t - 1]).logsumexp(-1)) for t, m in enumerate(row.mask) if m)


@pytest.mark.parametrize("name", [*PAIRS, "ld", "wpo", "bco-running", "no reference"])
def test_the_loss_is_the_mean_of_the_function_over_pairs(tiny_llama, name):
    """Worked out from sums of log-probs that are made elsewhere."""
    state, batch, objective = state_of(tiny_llama), random_units(), ALL[name]
    metrics = train_step(state, batch, objective, tokens_per_micro_batch=70, **{**ONE, "lr_of": lambda u: 0.0})
    logp = score_rows(state.policy, batch.rows, sampling=PLAIN, tokens_per_micro_batch=10_000)
    alpha = objective.length_alpha or 1.0

    def total(values, at):
        mask, shorter = batch.rows[at].mask, min(batch.rows[at].num_tokens, batch.rows[at ^ 1].num_tokens)
        seen = [v for v, m in zip(values, mask, strict=True) if m]
        return math.fsum(v if i < shorter or not objective.length_alpha else alpha * v for i, v in enumerate(seen))

    known = {"delta": 0.7, "num_pairs": 5, "num_tokens": sum(r.num_tokens for r in batch.rows[0::2])}
    for side, rows in (("chosen", range(0, 10, 2)), ("rejected", range(1, 10, 2))):
        known[f"cur_{side}"] = torch.tensor([total(logp[i], i) for i in rows])
        ref = [total(batch.rows[i].columns["logp_ref"], i) for i in rows]
        known[f"ref_{side}"] = torch.tensor(ref) * (0.0 if name == "no reference" else 1.0)
        known[f"tokens_{side}"] = torch.tensor([batch.rows[i].num_tokens for i in rows])
    fn = objective.losses[0].fn
    names = set(inspect.signature(fn).parameters) - fn.keywords.keys()
    value = fn(**{n: v for n, v in known.items() if n in names})
    if objective.weigh_by_policy:
        aligned = [math.fsum(lp) - expected_logp(tiny_llama, row) for lp, row in zip(logp, batch.rows, strict=True)]
        sides = [torch.tensor([aligned[i] / batch.rows[i].num_tokens for i in range(at, 10, 2)]) for at in (0, 1)]
        value = value * torch.exp(sum(sides))
    expected = float(value.mean())
    if objective.beside is not None:
        plain = torch.tensor([math.fsum(logp[i]) for i in range(0, 10, 2)])
        example_mean = objective.beside.fn.keywords["normalization"] == "example_mean"
        expected += float((-plain / (known["tokens_chosen"] if example_mean else 1)).mean())
    assert metrics["train/loss"] == pytest.approx(expected, rel=2e-4)


def test_the_terms_of_a_mixture_are_weighed_and_reported(tiny_llama):
    state, batch = state_of(tiny_llama), random_units()
    still = {**ONE, "lr_of": lambda u: 0.0}
    mixed = train_step(state, batch, ALL["mixture"], **still)
    terms = [replace(term, weight=1.0) for term in ALL["mixture"].losses]
    sigmoid, ipo = (train_step(state, batch, PairObjective((term,)), **still)["train/loss"] for term in terms)
    assert [mixed["train/loss_sigmoid"], mixed["train/loss_ipo"]] == pytest.approx([sigmoid, 0.3 * ipo])
    assert mixed["train/loss"] == pytest.approx(sigmoid + 0.3 * ipo)


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lr_zero_stays_where_it_is(make_tiny, name, dtype):
    state = state_of(make_tiny("llama"), dtype=dtype)
    before, batch = weights_of(state), at_start(state, random_units())
    for _ in range(3):
        metrics = train_step(state, batch, ALL[name], epochs=2, **{**ONE, "lr_of": lambda u: 0.0})
        if ALL[name].needs_reference:
            assert metrics["train/reward_chosen_mean"] == pytest.approx(0.0, abs=1e-4)
    assert all(torch.equal(before[n], m) for n, m in state.weights.masters.items())


LORA = {"none": None, "lora": Lora(rank=4), "lora with dropout": Lora(rank=4, dropout=0.5)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", LORA)
def test_at_the_start_every_margin_is_zero(make_tiny, lora, dtype):
    """DPO's loss is ln 2 and all rewards are 0, for the full model, an adapter, and an adapter whose dropout is on."""
    state = state_of(make_tiny("llama", lora=LORA[lora]), dtype=dtype)
    batch = at_start(state, random_units(), reference=Reference(state.policy))
    still = {**ONE, "lr_of": lambda u: 0.0}
    metrics = train_step(state, batch, PairObjective((SIGMOID,)), dropout="dropout" in lora, tokens_per_micro_batch=70, **still)
    near = pytest.approx(0.0, abs=1e-5 if dtype == "float32" else 0.05)
    assert metrics["train/loss"] == pytest.approx(math.log(2), abs=1e-6 if dtype == "float32" else 1e-3)
    assert [metrics[f"train/{n}"] for n in ("reward_chosen_mean", "reward_rejected_mean", "preference_margin")] == [near, near, near]


AT_START = {
    "sigmoid": math.log(2), "sigmoid_norm": math.log(2), "robust": math.log(2), "hinge": 1.0, "ipo": (1 / 0.6) ** 2,
    "nca_pair": 2 * math.log(2), "sppo_hard": 2 * (1 / 0.6) ** 2, "aot": math.log(2), "aot_unpaired": math.log(2), "apo_zero": 1.0,
    "apo_down": 1.0, "discopop": 0.5 * (math.log(2) + 1), "exo_pair": -math.log(2) - 0.5 * math.log(0.9 * 0.1),
    "kto": (3 * 1.0 + 2 * 1.3) / 5 / 2, "bco_pair": math.log1p(math.exp(0.2)) + math.log1p(math.exp(-0.2)),
}


@pytest.mark.parametrize("name", [n for n in (*PAIRS, *SINGLES) if ALL[n].needs_reference])
def test_at_the_start_the_loss_is_what_its_equation_says(make_tiny, name):
    state, batch = state_of(make_tiny("llama")), random_units()
    if name == "kto":
        batch = replace(batch, rows=tuple(replace(r, numbers={"wanted": float(i // 2 % 2 == 0)}) for i, r in enumerate(batch.rows)))
    metrics = train_step(state, at_start(state, batch), ALL[name], **{**ONE, "lr_of": lambda u: 0.0})
    assert metrics["train/loss"] == pytest.approx(AT_START[name], abs=1e-4)


DOWN_FIRST = {"discopop"}     # rises with the margin around 0, arXiv:2406.08414


@pytest.mark.parametrize("name", [*PAIRS, *MIXED])
def test_a_step_moves_chosen_up_against_rejected(make_tiny, name):
    state = state_of(make_tiny("llama"))
    batch = at_start(state, random_units(8))
    before, weights = sums(state, batch), weights_of(state)
    metrics = train_step(state, batch, ALL[name], **ONE)
    gain = [b - a for a, b in zip(before, sums(state, batch), strict=True)]
    chosen, rejected = sum(gain[0::2]), sum(gain[1::2])
    if name == "nll":
        assert chosen > 0
    else:
        assert (chosen < rejected) if name in DOWN_FIRST else (chosen > rejected)
    assert 0 < metrics["train/grad_norm"] < math.inf
    assert any(not torch.equal(weights[n], m) for n, m in state.weights.masters.items())


@pytest.mark.parametrize("name", SINGLES)
def test_a_step_moves_wanted_answers_up_against_unwanted_ones(make_tiny, name):
    state = state_of(make_tiny("llama"))
    batch = at_start(state, random_units(8))
    before = sums(state, batch)
    train_step(state, batch, ALL[name], **ONE)
    gain = [b - a for a, b in zip(before, sums(state, batch), strict=True)]
    wanted = [g for g, row in zip(gain[0::2], batch.rows[0::2], strict=True) if row.numbers["wanted"]]
    unwanted = [g for g, row in zip(gain[0::2], batch.rows[0::2], strict=True) if not row.numbers["wanted"]]
    assert sum(wanted) / len(wanted) > sum(unwanted) / len(unwanted)


def test_kto_has_no_gradient_through_its_baseline_and_counts_its_answers_once(tiny_llama):
    """The tokens of the other answers change the value only by z0; where that is 0 they change nothing."""
    state = state_of(tiny_llama)
    batch = random_units(6)
    low = [row.put(logp_ref=0.0) if i % 2 else row for i, row in enumerate(batch.rows)]      # mismatched: cur < ref, so z0 = 0
    other = [replace(row, tokens=tuple((t + 7) % 60 for t in row.tokens)) if i % 2 else row for i, row in enumerate(low)]
    one, metrics = gradients(state, replace(batch, rows=tuple(low)), ALL["kto"], tokens_per_micro_batch=70)
    two, _ = gradients(state, replace(batch, rows=tuple(other)), ALL["kto"], tokens_per_micro_batch=70)
    assert_same_gradients(one, two)
    assert metrics["train/kto_baseline_nats"] == 0.0
    high = [row.put(logp_ref=-6.0) if i % 2 else row for i, row in enumerate(batch.rows)]
    _, metrics = gradients(state, replace(batch, rows=tuple(high)), ALL["kto"], tokens_per_micro_batch=70)
    logp = sums(state, batch)
    expected = sum(logp[i] + 6.0 * batch.rows[i].num_tokens for i in range(1, 12, 2)) / 6
    assert metrics["train/kto_baseline_nats"] == pytest.approx(expected, rel=1e-5)


def test_the_metrics_are_those_worked_out_by_hand(tiny_llama):
    state, batch = state_of(tiny_llama), random_units()
    metrics = train_step(state, batch, PAIRS["sigmoid"], tokens_per_micro_batch=70, **{**ONE, "lr_of": lambda u: 0.0})
    logp = sums(state, batch)
    gain = [lp - math.fsum(row.columns["logp_ref"]) for lp, row in zip(logp, batch.rows, strict=True)]
    margin = [c - r for c, r in zip(gain[0::2], gain[1::2], strict=True)]
    assert metrics["train/reward_chosen_mean"] == pytest.approx(0.3 * sum(gain[0::2]) / 5, rel=1e-4)
    assert metrics["train/reward_rejected_mean"] == pytest.approx(0.3 * sum(gain[1::2]) / 5, rel=1e-4)
    assert metrics["train/preference_margin"] == pytest.approx(0.3 * sum(margin) / 5, rel=1e-4)
    assert metrics["train/preference_accuracy_frac"] == sum(m > 0 for m in margin) / 5
    assert metrics["train/logp_chosen_nats"] == pytest.approx(sum(logp[0::2]) / 5, rel=1e-5)
    per_token = train_step(state, batch, PAIRS["simpo"], tokens_per_micro_batch=70, **{**ONE, "lr_of": lambda u: 0.0})
    expected = 0.3 * sum(logp[i] / batch.rows[i].num_tokens for i in range(0, 10, 2)) / 5
    assert per_token["train/reward_chosen_mean"] == pytest.approx(expected, rel=1e-4)


def test_a_tie_counts_half():
    rows = [Row((5, 6, 7), (False, True, True)).put(logp_ref=-1.0, logp_cur=-1.0) for _ in range(2)]
    from burnish.trainer.columns import collate
    from burnish.trainer.objective import Tally

    columns = collate(rows, [0, 1], device="cpu")
    tally = Tally()
    PAIRS["sigmoid"].measure({**columns.given, "mask": columns.mask_BT}, tally)
    assert tally.values()["train/preference_accuracy_frac"] == 0.5


@pytest.mark.parametrize("name", ["sigmoid", "aot", "kto"])
def test_a_step_that_is_not_finite_is_skipped_and_the_run_stops_after_k(make_tiny, name):
    state = state_of(make_tiny("llama"))
    batch = random_units()
    bad = replace(batch, rows=(batch.rows[0].put(logp_ref=math.nan), *batch.rows[1:]))
    before = weights_of(state)
    for _ in range(2):
        metrics = train_step(state, bad, ALL[name], max_skipped=3, tokens_per_micro_batch=70, **ONE)
        assert metrics["train/skipped_updates_count"] == 1
    with pytest.raises(NonFiniteError):
        train_step(state, bad, ALL[name], max_skipped=3, tokens_per_micro_batch=70, **ONE)
    assert all(torch.equal(before[n], m) for n, m in state.weights.masters.items())


def test_a_loss_that_takes_a_mean_is_told_what_shape_it_gave(tiny_llama):
    mean = PairObjective((LossTerm("mine", lambda cur_chosen, cur_rejected: (cur_rejected - cur_chosen).mean()),))
    with pytest.raises(ValueError, match=r"the loss mine returned the shape \(\) for 5 pairs"):
        train_step(state_of(tiny_llama), random_units(), mean, **ONE)


def test_mini_batches_hold_whole_pairs(make_tiny, monkeypatch):
    state, batch, seen = state_of(make_tiny("llama")), random_units(7), []
    real = PairObjective.terms

    def noting(self, columns, counts):
        seen.append((len(columns["mask"]), counts.num_units))
        return real(self, columns, counts)

    monkeypatch.setattr(PairObjective, "terms", noting)
    train_step(state, batch, PAIRS["sigmoid"], minibatches=3, **ONE)
    assert sorted(seen, reverse=True) == [(6, 3), (4, 2), (4, 2)]
