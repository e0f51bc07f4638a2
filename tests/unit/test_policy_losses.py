"""What the golden vectors do not hold: where losses agree, extreme log-ratios, what `clipped` says, senseless settings."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch

from burnish.algorithms import policy_losses as pl
from burnish.algorithms import reduce
from burnish.algorithms.value_losses import clipped_error

BOUNDS = {"eps_low": 0.2, "eps_high": 0.28}
INF = float("inf")
LOSSES = {
    "ppo_clip": partial(pl.ppo_clip, **BOUNDS), "dual": partial(pl.ppo_clip, **BOUNDS, dual_clip=3.0),
    "reinforce": partial(pl.reinforce), "importance_sampling": partial(pl.importance_sampling),
    "gspo": partial(pl.gspo, **BOUNDS), "gspo_token": partial(pl.gspo_token, **BOUNDS),
    "cispo": partial(pl.cispo, ratio_min=0.0, ratio_max=5.0), "sapo": partial(pl.sapo, tau_pos=1.0, tau_neg=1.05),
    "dppo_tv": partial(pl.dppo_tv, delta_low=0.1, delta_high=0.1), "gmpo": partial(pl.gmpo, log_clip_low=0.4, log_clip_high=0.4),
    "sequence_ppo": partial(pl.sequence_ppo, **BOUNDS),
}
UNBOUNDED = {
    "ppo_clip without bounds": partial(pl.ppo_clip, eps_low=1.0, eps_high=INF),
    "gspo without bounds": partial(pl.gspo, eps_low=5.0, eps_high=INF),
    "gmpo without bounds": partial(pl.gmpo, log_clip_low=INF, log_clip_high=INF),
}


def call(fn, cur, other, adv, mask):
    given = {"logp_cur": cur, "logp_prox": other, "logp_gen": other, "adv": adv, "mask": mask}
    return fn(**{name: given[name] for name in inspect.signature(fn).parameters if name in given})


def random_batch(seed=0, spread=0.3):
    draw = torch.Generator().manual_seed(seed)
    prox = -torch.rand(6, 7, generator=draw, dtype=torch.float64) * 2
    cur = prox + spread * torch.randn(6, 7, generator=draw, dtype=torch.float64)
    adv = torch.randn(6, 1, generator=draw, dtype=torch.float64).expand(6, 7)
    mask = torch.rand(6, 7, generator=draw) < 0.7
    mask[:, 0], mask[5] = True, False
    return [torch.where(mask, x, 0.0) for x in (cur, prox, adv)] + [mask]


def test_every_loss_of_the_file_is_here():
    public = {name for name, fn in vars(pl).items() if inspect.isfunction(fn) and "adv" in inspect.signature(fn).parameters}
    assert {name for name in public if not name.startswith("_")} == {fn.func.__name__ for fn in LOSSES.values()}


@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name):
    _, prox, adv, mask = random_batch()
    counts = {"num_tokens": int(mask.sum()), "num_rollouts": 5}
    cur = prox.clone().requires_grad_()
    got = torch.autograd.grad(reduce.rollout_mean(call(LOSSES[name], cur, prox, adv, mask), mask, **counts), cur)[0]
    simple = reduce.rollout_sum if name == "sequence_ppo" else reduce.rollout_mean
    want = torch.autograd.grad(simple(pl.reinforce(cur, adv), mask, **counts), cur)[0]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "sequence_ppo"])
def test_with_one_token_a_rollout_it_is_ppo(name):
    cur, prox, adv, _ = random_batch(1, spread=0.8)
    mask = torch.zeros(6, 7, dtype=torch.bool)
    mask[:, 0] = True
    cur, prox, adv = (torch.where(mask, x, 0.0) for x in (cur, prox, adv))
    ours, ppo = LOSSES[name], LOSSES["ppo_clip"]
    torch.testing.assert_close(call(ours, cur, prox, adv, mask)[mask], call(ppo, cur, prox, adv, mask)[mask])
    hit = call(partial(ours.func.clipped, **BOUNDS), cur, prox, adv, mask)
    assert torch.equal(hit[mask], call(partial(ppo.func.clipped, **BOUNDS), cur, prox, adv, mask)[mask]) and hit.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [900.0, -900.0, INF])
@pytest.mark.parametrize("name", [*LOSSES, *UNBOUNDED])
def test_extreme_log_ratios_have_a_gradient_wherever_the_loss_is_finite(name, log_ratio, dtype):
    mask = torch.tensor([[True, True, False]])
    for a in (1.0, -1.0, 0.0):
        cur = torch.tensor([[min(log_ratio, 0.0), -0.1, 0.0]], dtype=dtype, requires_grad=True)
        other = torch.tensor([[-max(log_ratio, 0.0), -0.2, 0.0]], dtype=dtype)
        loss = call((LOSSES | UNBOUNDED)[name], cur, other, torch.tensor([[a, a, 0.0]], dtype=dtype), mask)
        loss = reduce.masked(loss, mask)
        grad = torch.autograd.grad(loss.sum(), cur)[0]
        assert not loss.isnan().any() and not grad.isnan().any(), (a, loss, grad)
        assert grad.isfinite().all() or not loss.isfinite().all(), (a, loss, grad)
        assert a != 0 or (loss == 0).all()


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo", "sequence_ppo"])
def test_sums_over_tokens_see_valid_tokens_only(name):
    cur, prox, adv, mask = random_batch(2)
    grads = []
    for garbage in (0.0, 900.0, float("nan")):
        dirty = torch.where(mask, cur, garbage).requires_grad_()
        loss = reduce.token_sum(call(LOSSES[name], dirty, prox, adv, mask), mask, num_tokens=1, num_rollouts=1)
        grads.append(torch.autograd.grad(loss, dirty)[0])
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    assert (grads[0][~mask] == 0).all() and (grads[0][5] == 0).all()


@pytest.mark.parametrize("name", [n for n in LOSSES if hasattr(LOSSES[n].func, "clipped") and n != "cispo"])
def test_clipped_are_the_tokens_without_a_gradient(name):
    cur, prox, adv, mask = random_batch(3, spread=1.5)
    fn = LOSSES[name]
    cur.requires_grad_()
    silent = torch.zeros_like(mask)
    loss = call(fn, cur, prox, adv, mask)
    for b, t in mask.nonzero().tolist():
        silent[b, t] = torch.autograd.grad(loss[b, t], cur, retain_graph=True)[0][b, t] == 0
    hit = call(partial(fn.func.clipped, **fn.keywords), cur, prox, adv, mask)
    if name == "dual":
        dual = call(partial(pl.ppo_clip.dual_clipped, **fn.keywords), cur, prox, adv, mask)
        assert (dual & mask).any() and not (dual & hit).any()
        hit = hit | dual
    assert torch.equal(hit & mask, silent) and silent.any() and not silent[mask].all()


def test_values_by_hand():
    ratio, adv = torch.tensor([[1.5, 0.5, 1.5, 0.5, 9.0]]), torch.tensor([[1.0, 1.0, -1.0, -1.0, -2.0]])
    cur, prox = ratio.log(), torch.zeros(1, 5)
    torch.testing.assert_close(LOSSES["ppo_clip"](cur, prox, adv), torch.tensor([[-1.28, -0.5, 1.5, 0.8, 18.0]]))
    torch.testing.assert_close(LOSSES["dual"](cur, prox, adv), torch.tensor([[-1.28, -0.5, 1.5, 0.8, 6.0]]))
    # sqrt(1.5 * 0.5) = 0.866025; bounded below for gmpo by e^-0.4, so sqrt(1.5 * 0.67032) = 1.002737; 1.5 * 0.5 = 0.75 < 0.8
    two, minus, mask = cur[:, :2], -torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    torch.testing.assert_close(LOSSES["gspo"](two, prox[:, :2], minus, mask), torch.full((1, 2), 0.866025))
    torch.testing.assert_close(LOSSES["gmpo"](two, prox[:, :2], minus, mask), torch.full((1, 2), 1.002737))
    torch.testing.assert_close(LOSSES["sequence_ppo"](two, prox[:, :2], minus, mask), torch.full((1, 2), 0.8))
    assert pl.sequence_ratio(torch.tensor([[7.0, 7.0]]), torch.zeros(1, 2, dtype=torch.bool)).tolist() == [1.0]


def test_dppo_goes_by_probabilities_where_ppo_goes_by_ratios():
    """From 0.001 to 0.002 is a ratio of 2 and almost no distance; from 0.5 to 0.62 is no great ratio and a large distance."""
    gen, cur, adv = torch.tensor([[0.001, 0.5]]).log(), torch.tensor([[0.002, 0.62]]).log(), torch.ones(1, 2)
    assert LOSSES["dppo_tv"].func.clipped(cur, gen, adv, delta_low=0.1, delta_high=0.1).tolist() == [[False, True]]
    assert pl.ppo_clip.clipped(cur, gen, adv, **BOUNDS).tolist() == [[True, False]]


@pytest.mark.parametrize(("fn", "values", "says"), [
    (pl.ppo_clip, {**BOUNDS, "dual_clip": 1.0}, "dual_clip"), (pl.ppo_clip, {"eps_low": -0.1, "eps_high": 0.2}, "eps_low"),
    (pl.gspo, {"eps_low": 0.1, "eps_high": float("nan")}, "eps_high"), (pl.gspo_token, {"eps_low": -1, "eps_high": 0.2}, "eps_low"),
    (pl.sequence_ppo, {"eps_low": 0.1, "eps_high": -0.2}, "eps_high"), (pl.cispo, {"ratio_min": 2.0, "ratio_max": 1.0}, "ratio_min"),
    (pl.cispo, {"ratio_min": 0.0, "ratio_max": INF}, "ratio_max"), (pl.sapo, {"tau_pos": 0.0, "tau_neg": 1.0}, "tau_pos"),
    (pl.dppo_tv, {"delta_low": -0.1, "delta_high": 0.1}, "delta_low"),
    (pl.gmpo, {"log_clip_low": -0.4, "log_clip_high": 0.4}, "log_clip_low"),
    (clipped_error, {"clip": 0.0}, "clip"),
])
def test_senseless_values(fn, values, says):
    one = torch.zeros(1, 1)
    args = [one, one, one, one.bool()] if "mask" in inspect.signature(fn).parameters else [one, one, one]
    with pytest.raises(ValueError, match=says):
        fn(*args, **values)


def test_value_loss():
    cur = torch.tensor([[1.0, 1.0, 0.05, 3.0]], requires_grad=True)
    prox, ret = torch.zeros(1, 4), torch.tensor([[2.0, -1.0, 1.0, 1.0]])
    # held within 0.2 of 0: (0.2-2)^2 > (1-2)^2 clips; (0.2+1)^2 < (1+1)^2 does not; 0.05 is inside; (0.2-1)^2 < (3-1)^2 does not
    loss = clipped_error(cur, prox, ret, clip=0.2)
    torch.testing.assert_close(loss.detach(), torch.tensor([[1.62, 2.0, 0.45125, 2.0]]))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), cur)[0], torch.tensor([[0.0, 2.0, -0.95, 2.0]]))
    assert clipped_error.clipped(cur, prox, ret, clip=0.2).tolist() == [[True, False, False, False]]
    assert torch.equal(clipped_error(cur, prox, ret, clip=100.0), clipped_error(cur, prox, ret, clip=None))
