"""Preference losses: properties over the whole room by enumeration, equalities between methods, and the terms around them."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import math
from dataclasses import asdict

import pytest
import torch

from burnish.algorithms import preference_losses as losses
from burnish.algorithms import preference_terms as terms


def takes(fn, value):
    return value in inspect.signature(fn).parameters


ROOM = {
    name: fn for name, fn in vars(losses).items()
    if inspect.isfunction(fn) and fn.__module__ == losses.__name__ and not name.startswith("_") and takes(fn, "cur_chosen")
}
VALUES = {
    "beta": 0.3, "label_smoothing": 0.1, "delta": 0.2, "tau": 0.05, "gamma": 0.5, "length_normalize": False,
    "normalization": "token_mean", "num_pairs": 5, "num_tokens": 17,
}
VARIANTS = {
    "sigmoid-forward_kl": functools.partial(losses.sigmoid, f_divergence="forward_kl"),
    "sigmoid-js": functools.partial(losses.sigmoid, f_divergence="js"),
    "sigmoid-alpha0.5": functools.partial(losses.sigmoid, f_divergence="alpha", alpha=0.5),
    "sigmoid-alpha2": functools.partial(losses.sigmoid, f_divergence="alpha", alpha=2.0),
    "ipo-mean": functools.partial(losses.ipo, length_normalize=True),
    "nll-example_mean": functools.partial(losses.nll, normalization="example_mean"),
    "nll-sequence_sum": functools.partial(losses.nll, normalization="sequence_sum"),
}
ALL = {**ROOM, **VARIANTS}
every_loss = pytest.mark.parametrize("name", sorted(ALL))
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
LN2 = math.log(2)


def softplus(x):
    return math.log1p(math.exp(x))


def columns(cur_chosen, cur_rejected, ref_chosen=None, ref_rejected=None, tokens=(4, 4), dtype=torch.float64):
    """One value or a list for each; the reference is the policy if it is not given."""
    made = {"cur_chosen": cur_chosen, "cur_rejected": cur_rejected}
    made["ref_chosen"] = cur_chosen if ref_chosen is None else ref_chosen
    made["ref_rejected"] = cur_rejected if ref_rejected is None else ref_rejected
    made = {k: torch.atleast_1d(torch.as_tensor(v, dtype=dtype)).clone() for k, v in made.items()}
    for side, count in zip(("chosen", "rejected"), tokens, strict=True):
        made[f"tokens_{side}"] = torch.as_tensor(count).expand(len(made["cur_chosen"]))
    made["cur_chosen"].requires_grad_()
    made["cur_rejected"].requires_grad_()
    return made


def call(name, args, **values):
    fn = ALL[name] if isinstance(name, str) else name
    params = inspect.signature(fn).parameters
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    given = {k: v for k, v in {**VALUES, **args, **values}.items() if k in params and (k not in bound or k in values)}
    missing = [k for k, p in params.items() if p.default is p.empty and k not in given and k not in bound]
    assert not missing, f"give {missing} of {name} a value in VALUES"
    return fn(**given)


def grads(name, args, **values):
    sides = (args["cur_chosen"], args["cur_rejected"])
    return torch.autograd.grad(call(name, args, **values).sum(), sides, allow_unused=True, materialize_grads=True)


def five_pairs():
    return columns(
        [-3.0, -7.5, -1.25, -0.5, -9.0], [-4.0, -2.0, -6.5, -0.75, -8.0], [-3.5, -6.0, -2.0, -0.25, -9.5], [-3.0, -2.5, -5.0, -1.5, -7.0],
        tokens=([3, 5, 1, 2, 6], [4, 2, 3, 1, 5]),
    )


HALF_INVERSE_BETA_SQUARED = (1 / (2 * 0.3)) ** 2
AT_ZERO = {
    "sigmoid": LN2, "sigmoid_norm": LN2, "robust": LN2, "aot": LN2, "aot_unpaired": LN2, "cpo": LN2, "orpo": LN2,
    "hinge": 1.0, "slic": 0.2, "ipo": HALF_INVERSE_BETA_SQUARED, "sppo_hard": 2 * HALF_INVERSE_BETA_SQUARED,
    "exo_pair": -LN2 - 0.5 * math.log(0.9 * 0.1), "nca_pair": 2 * LN2, "bco_pair": softplus(0.2) + softplus(-0.2),
    "apo_zero": 1.0, "apo_down": 1.0, "discopop": 0.5 * (LN2 + 1), "simpo": 0.9 * softplus(0.5) + 0.1 * softplus(-0.5),
    "nll": 4 * 5 / 17,
    "sigmoid-forward_kl": LN2, "sigmoid-js": LN2, "sigmoid-alpha0.5": LN2, "sigmoid-alpha2": LN2, "ipo-mean": HALF_INVERSE_BETA_SQUARED,
    "nll-example_mean": 1.0, "nll-sequence_sum": 4.0,
}


@both_dtypes
@every_loss
def test_value_where_nothing_is_preferred(name, dtype):
    got = call(name, columns(-4.0, -4.0, dtype=dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got, torch.tensor([AT_ZERO[name]], dtype=dtype))


SIGNS_AT_ZERO = {"apo_down": (0, 1), "discopop": (1, -1), "nll": (-1, 0)}     # the others: chosen up (-1), rejected down (1)


@every_loss
def test_the_gradient_raises_chosen_and_lowers_rejected_where_nothing_is_preferred(name):
    got = grads(name, columns(-4.0, -4.0))
    assert tuple(g.sign().item() for g in got) == SIGNS_AT_ZERO.get(name.partition("-")[0], (-1, 1))


@every_loss
def test_a_pair_in_order_costs_less_than_the_same_pair_swapped(name):
    in_order, swapped = call(name, columns(-3.0, -5.0, -4.0, -4.0)), call(name, columns(-5.0, -3.0, -4.0, -4.0))
    assert in_order < swapped


@both_dtypes
@every_loss
def test_values_and_gradients_are_finite_for_any_log_probs(name, dtype):
    cur_w, cur_l, ref_w, ref_l = torch.tensor(list(itertools.product((0.0, -1000.0), repeat=4)), dtype=dtype).T
    for tokens in ((1, 1), (40, 3), (0, 7)):
        args = columns(cur_w, cur_l, ref_w, ref_l, tokens=tokens, dtype=dtype)
        for got in (call(name, args), *grads(name, args)):
            assert got.isfinite().all()


@every_loss
def test_only_coupled_losses_depend_on_the_other_pairs(name):
    args = five_pairs()
    parts = [call(name, {k: v[rows] for k, v in args.items()}) for rows in (slice(0, 2), slice(2, 5))]
    alone = torch.allclose(sum(p.sum() for p in parts), call(name, args).sum(), rtol=1e-12, atol=0)
    assert alone != getattr(ALL[name], "coupled", False)


@pytest.mark.parametrize("name", sorted(n for n in ROOM if takes(ROOM[n], "label_smoothing") and n != "exo_pair"))
def test_label_smoothing_mixes_the_pair_with_the_pair_swapped(name):
    args = five_pairs()
    mirror = {"chosen": "rejected", "rejected": "chosen"}
    swapped = {f"{kind}_{mirror[side]}": v for (kind, side), v in ((k.split("_"), v) for k, v in args.items())}
    plain, other = (call(name, a, label_smoothing=0.0, gamma=0.0).sum() for a in (args, swapped))
    expected = (0.8 * plain - 0.2 * other) / 0.6 if name == "robust" else 0.8 * plain + 0.2 * other
    torch.testing.assert_close(call(name, args, label_smoothing=0.2, gamma=0.0).sum(), expected)


@pytest.mark.parametrize("name", sorted(n for n in ROOM if takes(ROOM[n], "beta")))
@pytest.mark.parametrize("beta", [0.0, -0.1])
def test_a_beta_that_prefers_nothing_or_the_rejected_is_refused(name, beta):
    with pytest.raises(ValueError, match=r"beta must be above 0"):
        call(name, columns(-4.0, -4.0), beta=beta)


@pytest.mark.parametrize("name", sorted(n for n in ROOM if takes(ROOM[n], "label_smoothing")))
@pytest.mark.parametrize("share", [-0.1, 0.6])
def test_a_smoothing_that_turns_the_labels_around_is_refused(name, share):
    with pytest.raises(ValueError, match="label_smoothing"):
        call(name, columns(-4.0, -4.0), label_smoothing=share)


@pytest.mark.parametrize("name, values, message", [
    ("robust", {"label_smoothing": 0.5}, "below 0.5"),
    ("exo_pair", {"label_smoothing": 0.0}, "above 0"),
    ("discopop", {"tau": 0.0}, "tau must be above 0"),
    ("sigmoid", {"f_divergence": "kl"}, "reverse_kl, forward_kl, js or alpha, got 'kl'"),
    ("sigmoid", {"f_divergence": "alpha"}, "alpha"),
    ("sigmoid", {"alpha": 0.5}, "alpha belongs to"),
    ("nll", {"normalization": "mean"}, "example_mean, token_mean or sequence_sum, got 'mean'"),
])
def test_senseless_values_are_refused(name, values, message):
    with pytest.raises(ValueError, match=message):
        call(name, columns(-4.0, -4.0), **values)


def test_which_losses_need_a_reference():
    without = {n for n, f in ROOM.items() if not any(p.startswith("ref_") for p in inspect.signature(f).parameters)}
    assert without == {"slic", "cpo", "simpo", "orpo", "nll"}


@pytest.mark.parametrize("one, other, fixed", [
    ((losses.robust, {"label_smoothing": 0.0}), (losses.sigmoid, {"label_smoothing": 0.0}), {}),
    ((losses.sigmoid_norm, {}), (losses.sigmoid, {}), {"tokens": 1}),
    ((losses.ipo, {"length_normalize": True}), (losses.ipo, {"length_normalize": False}), {"tokens": 1}),
    ((losses.simpo, {"gamma": 0.0}), (losses.cpo, {}), {"tokens": 1}),
    ((losses.sigmoid, {"f_divergence": "alpha", "alpha": 1.0}), (losses.sigmoid, {"f_divergence": "reverse_kl"}), {}),
    ((losses.sigmoid, {"f_divergence": "alpha", "alpha": 1 + 1e-9}), (losses.sigmoid, {"f_divergence": "reverse_kl"}), {}),
    ((losses.sigmoid, {"f_divergence": "alpha", "alpha": 0.0}), (losses.sigmoid, {"f_divergence": "forward_kl"}), {}),
    ((losses.cpo, {}), (losses.sigmoid, {}), {"ref": 0.0}),
    ((losses.aot, {}), (losses.sigmoid, {}), {"pairs": 1}),
    ((losses.aot_unpaired, {}), (losses.sigmoid, {}), {"pairs": 1}),
    ((losses.nll, {"normalization": "token_mean", "num_tokens": 5}), (losses.nll, {"normalization": "example_mean"}), {"tokens": 1}),
])
def test_two_methods_agree_where_they_must(one, other, fixed):
    args = {k: v[:fixed.get("pairs", 5)] for k, v in five_pairs().items()}
    if "tokens" in fixed:
        args |= {k: torch.full_like(v, fixed["tokens"]) for k, v in args.items() if k.startswith("tokens")}
    if "ref" in fixed:
        args |= {k: torch.full_like(v, fixed["ref"]) for k, v in args.items() if k.startswith("ref")}
    (fn, values), (other_fn, other_values) = one, other
    for got, expected in zip(
        (call(fn, args, **values), *grads(fn, args, **values)),
        (call(other_fn, args, **other_values), *grads(other_fn, args, **other_values)), strict=True,
    ):
        torch.testing.assert_close(got, expected)


def test_unpaired_optimal_transport_does_not_care_who_is_whose_partner():
    args = five_pairs()
    shuffled = {k: v[torch.tensor([3, 0, 4, 1, 2])] if "rejected" in k else v for k, v in args.items()}
    torch.testing.assert_close(call("aot_unpaired", shuffled), call("aot_unpaired", args))
    assert not torch.allclose(call("aot", shuffled).sum(), call("aot", args).sum())


@both_dtypes
def test_forward_kl_still_pulls_where_the_policy_has_lost_the_chosen_answer(dtype):
    chosen, rejected = grads("sigmoid-forward_kl", columns(-1000.0, -4.0, -4.0, -4.0, dtype=dtype), label_smoothing=0.0)
    assert chosen < -1e15 and rejected > 0


@pytest.mark.parametrize("normalization", ["example_mean", "token_mean", "sequence_sum"])
def test_nll_is_the_mean_it_is_called(normalization):
    args = five_pairs()
    logp, tokens = args["cur_chosen"], args["tokens_chosen"]
    expected = {"example_mean": -(logp / tokens).mean(), "token_mean": -logp.sum() / 17, "sequence_sum": -logp.mean()}
    torch.testing.assert_close(call("nll", args, normalization=normalization).sum() / 5, expected[normalization])


def kto(cur, ref, desirable, kl, **values):
    cur, ref, kl = (torch.tensor(v, dtype=torch.float64) for v in (cur, ref, kl))
    return losses.kto(cur.requires_grad_(), ref, torch.tensor(desirable), kl, **values), cur


def test_kto_weighs_both_kinds_and_pushes_them_apart():
    loss, cur = kto([-4.0, -4.0], [-4.0, -4.0], [True, False], 0.0, beta=0.2, desirable_weight=1.0, undesirable_weight=1.5)
    torch.testing.assert_close(loss, torch.tensor([0.5, 0.75], dtype=torch.float64))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), cur)[0], torch.tensor([-0.05, 0.075], dtype=torch.float64))
    shifted, _ = kto([-3.0, -3.0], [-4.0, -4.0], [True, False], 1.0, beta=0.2, desirable_weight=1.0, undesirable_weight=1.5)
    torch.testing.assert_close(shifted, loss)


def test_kto_is_finite_for_any_log_ratio_and_refuses_beta_0():
    even = {"desirable_weight": 1.0, "undesirable_weight": 1.0}
    loss, cur = kto([0.0, -1e3, 0.0, -1e3], [-1e3, 0.0, -1e3, 0.0], [True, True, False, False], 3.0, beta=0.5, **even)
    torch.testing.assert_close(loss, torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    assert torch.autograd.grad(loss.sum(), cur)[0].isfinite().all()
    with pytest.raises(ValueError, match="beta must be above 0"):
        kto([0.0], [0.0], [True], 0.0, beta=0.0, **even)


def test_kto_does_not_train_through_its_baseline():
    cur, kl = torch.zeros(1, requires_grad=True), torch.ones((), requires_grad=True)
    loss = losses.kto(cur, torch.zeros(1), torch.tensor([True]), kl, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)
    assert torch.autograd.grad(loss.sum(), (cur, kl), allow_unused=True)[1] is None


def test_the_baseline_of_kto_is_a_clamped_mean_without_a_gradient():
    cur = torch.tensor([-1.0, -5.0], requires_grad=True)
    baseline = losses.kto_baseline(cur, torch.tensor([-4.0, -4.0]))
    assert baseline == 1.0 and not baseline.requires_grad and losses.kto_baseline.coupled
    assert losses.kto_baseline(cur, torch.tensor([0.0, 0.0])) == 0.0
    assert losses.kto_baseline(cur[:0], cur[:0]) == 0.0


LOGP = [[-1.0, math.nan, -2.0, -4.0, -8.0], [-1.0, -2.0, -3.0, math.inf, 5.0], [math.nan] * 5]
MASK = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()


def test_a_sequence_is_the_sum_of_its_trained_tokens():
    logp = torch.tensor(LOGP, requires_grad=True)
    got = terms.sequence_logprob(logp, MASK)
    torch.testing.assert_close(got, torch.tensor([-15.0, -6.0, 0.0]))
    torch.testing.assert_close(torch.autograd.grad(got.sum(), logp)[0], MASK.float())


def test_tokens_past_the_shorter_answer_weigh_alpha():
    logp, other = torch.tensor(LOGP, requires_grad=True), torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
    got = terms.length_desensitized(logp, MASK, other, alpha=0.25)
    torch.testing.assert_close(got, torch.tensor([-6.0, -6.0, 0.0]))      # -1 - 2 - (4 + 8)/4
    weight = torch.tensor([[1, 0, 1, 0.25, 0.25], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    torch.testing.assert_close(torch.autograd.grad(got.sum(), logp)[0], weight)
    torch.testing.assert_close(terms.length_desensitized(logp, MASK, other, alpha=1.0), terms.sequence_logprob(logp, MASK))
    torch.testing.assert_close(terms.length_desensitized(logp, MASK, other, alpha=0.0), torch.tensor([-3.0, -6.0, 0.0]))
    with pytest.raises(ValueError, match="alpha"):
        terms.length_desensitized(logp, MASK, other, alpha=1.5)


def test_a_pair_weighs_by_how_likely_the_policy_writes_it():
    cur_w = torch.tensor([-3 * LN2, -LN2, -1e3, 0.0], requires_grad=True)
    cur_l, expected = torch.tensor([-4 * LN2, 0.0, -1e3, 0.0]), torch.tensor([0.0, -2 * LN2, 0.0, 0.0])
    tokens_w, tokens_l = torch.tensor([3, 1, 1, 0]), torch.tensor([2, 1, 1, 0])
    got = terms.likelihood_weight(cur_w, cur_l, expected, torch.zeros(4), tokens_w, tokens_l)
    torch.testing.assert_close(got, torch.tensor([1 / 8, 2.0, 0.0, 1.0]))
    assert not got.requires_grad


def test_implied_rewards_have_no_gradient():
    got = terms.rewards_of(torch.tensor([-1.0], requires_grad=True), torch.tensor([-3.0]), beta=0.1)
    torch.testing.assert_close(got, torch.tensor([0.2]))
    assert not got.requires_grad


def test_the_running_reward_is_the_mean_of_all_pairs_and_survives_json():
    chosen, rejected = torch.tensor([1.0, 2.0, 3.0, 10.0, 0.0]), torch.tensor([-1.0, 0.0, 4.0, 2.0, -6.0])
    running = terms.RunningReward()
    assert running.update(chosen[:3], rejected[:3]) == pytest.approx(1.5)
    running = terms.RunningReward(**json.loads(json.dumps(asdict(running))))
    assert running.update(chosen[:0], rejected[:0]) == pytest.approx(1.5)
    assert running.update(chosen[3:], rejected[3:]) == pytest.approx(torch.cat([chosen, rejected]).mean().item())
    with pytest.raises(ValueError, match="not pairs"):
        running.update(chosen, rejected[:2])


def test_best_and_worst_of_each_group_that_has_both():
    reward = torch.tensor([1.0, 3.0, 3.0, 1.0, 5.0, 2.0, 2.0, 0.0])
    groups = [[3, 2, 1, 0], [4], [], [5, 6], [7, 4]]
    assert terms.best_and_worst(reward, groups) == [(2, 3), (4, 7)]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_reference_moves_towards_the_policy(kind):
    ref = [torch.tensor([0.0, 8.0], dtype=kind), torch.tensor([[2.0]], dtype=kind, requires_grad=True)]
    cur = [torch.tensor([4.0, 4.0], requires_grad=True), torch.tensor([[10.0]], requires_grad=True)]
    terms.mix_(ref, cur, alpha=0.25)
    assert [r.tolist() for r in ref] == [[1.0, 7.0], [[4.0]]] and ref[0].grad_fn is None and ref[1].grad_fn is None
    terms.mix_(ref, cur, alpha=1.0)
    assert [r.tolist() for r in ref] == [c.tolist() for c in cur] and ref[0].dtype == kind


def test_the_reference_takes_no_senseless_share_and_no_other_list():
    ref, cur = [torch.zeros(2)], [torch.ones(2)]
    for alpha in (0.0, 1.1):
        with pytest.raises(ValueError, match="alpha must be above 0"):
            terms.mix_(ref, cur, alpha=alpha)
    with pytest.raises(ValueError):
        terms.mix_(ref, [*cur, *cur], alpha=0.5)
