"""Advantages and the rewards before them: what the golden vectors do not pin."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from burnish.algorithms import advantages as adv
from burnish.algorithms import returns

NAN, INF = float("nan"), float("inf")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def holed(seed=0, rows=6, length=9):
    """Rewards, values and a mask with holes, left padding and one empty row; what stands at masked positions is NaN and inf."""
    g = torch.Generator().manual_seed(seed)
    reward, value = torch.randn(2, rows, length, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=g) < 0.6
    mask[0], mask[1] = False, True
    return reward.masked_fill(~mask, NAN), value.masked_fill(~mask, INF), mask


def compact(value, mask):
    """Each row's valid tokens moved to its left, 0 behind them."""
    out = torch.zeros_like(value)
    for row, (v, m) in enumerate(zip(value, mask, strict=True)):
        out[row, : m.sum()] = v[m]
    return out


# one number a rollout

def test_length_weighted_by_hand_and_with_equal_lengths():
    reward = f64(1, 0, 0)
    assert adv.length_weighted(reward, torch.tensor([3, 1, 1])).tolist() == pytest.approx([0.4, -0.6, -0.6])
    assert adv.length_weighted(reward, torch.tensor([7, 7, 7])).tolist() == pytest.approx(adv.center(reward).tolist())
    assert adv.length_weighted(torch.full((7,), 0.7), torch.arange(7)).tolist() == [0.0] * 7


def test_a_greedy_baseline_keeps_what_a_group_baseline_loses():
    assert adv.above_greedy(f64(1, 1), torch.tensor(0.25)).tolist() == [0.75, 0.75]


def test_over_one_group_the_batch_forms_are_the_group_forms():
    reward, groups = f64(1, 0, 3, 0.5), [[0, 1, 2, 3]]
    torch.testing.assert_close(adv.standardize_by_batch(reward, groups), adv.standardize(reward))
    torch.testing.assert_close(adv.rescale_by_signal(reward, groups), adv.center(reward))
    torch.testing.assert_close(adv.minus_batch_mean(reward), adv.center(reward))
    once = adv.standardize(reward, eps=0.0)
    torch.testing.assert_close(adv.standardize_each(reward[:, None], groups, weights=[5.0], eps=0.0), once)


@pytest.mark.parametrize("fn", [adv.standardize_by_batch, adv.rescale_by_signal])
def test_groups_without_signal_give_exactly_zero(fn):
    reward = torch.tensor([0.7] * 7 + [1.0, 0.0, 9.0])          # seven equal ones, a pair, a single one
    got = fn(reward, [list(range(7)), [7, 8], [9]])
    assert got[:7].tolist() == [0.0] * 7 and got[9] == 0 and got[7] == -got[8] > 0
    assert fn(torch.full((7,), 0.7), [[0, 1, 2], [3, 4, 5, 6]]).tolist() == [0.0] * 7


def test_a_step_half_without_signal_counts_double():
    reward, groups = f64(1, 1, 1, 1, 1, 0, 0, 0), [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert adv.signal_scale(reward, groups) == 2
    assert adv.rescale_by_signal(reward, groups, f_norm=0.5).tolist() == [0, 0, 0, 0, 3, -1, -1, -1]
    assert torch.equal(adv.signal_scale(reward - 1, groups), adv.signal_scale(reward, groups))     # no matter where 0 lies
    with pytest.raises(ValueError, match="f_norm is 0"):
        adv.rescale_by_signal(reward, groups, f_norm=0)


def test_no_score_drowns_another():
    g = torch.Generator().manual_seed(0)
    scores, groups = torch.randn(8, 2, generator=g, dtype=torch.float64), [[0, 3, 5, 6], [1, 2, 4, 7]]
    even = adv.standardize_each(scores, groups, weights=[1.0, 0.5], eps=0.0)
    torch.testing.assert_close(adv.standardize_each(scores * f64(1000, 1), groups, weights=[1.0, 0.5], eps=0.0), even)
    torch.testing.assert_close(even.std(), f64(1)[0])
    with pytest.raises(ValueError, match="3 weights for 2 scores"):
        adv.standardize_each(scores, groups, weights=[1.0, 1.0, 1.0])


# one number a token

@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_are_sums_over_the_valid_tokens_that_follow(gamma):
    reward, _, mask = holed()
    got = adv.returns_to_go(reward, mask, gamma=gamma)
    assert (got[~mask] == 0).all()
    for row, valid in zip(compact(got, mask), reward, strict=True):
        valid = valid[~valid.isnan()]
        wanted = [sum(gamma**k * r for k, r in enumerate(valid[t:].tolist())) for t in range(len(valid))]
        assert row[: len(valid)].tolist() == pytest.approx(wanted)


def test_gae_by_its_definition():
    reward, value, mask = holed()
    bootstrap, gamma, lam = torch.linspace(-1, 1, len(mask), dtype=torch.float64), 0.95, 0.8
    got = adv.gae(reward, value, mask, bootstrap, gamma=gamma, lam=lam)
    assert (got[~mask] == 0).all()
    for row in range(len(mask)):
        r, v = reward[row][mask[row]], torch.cat([value[row][mask[row]], bootstrap[row : row + 1]])
        delta = [float(r[t] + gamma * v[t + 1] - v[t]) for t in range(len(r))]
        wanted = [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(r))]
        assert got[row][mask[row]].tolist() == pytest.approx(wanted)


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    reward, value, mask = holed()
    bootstrap, gamma = torch.ones(len(mask), dtype=torch.float64), 0.9
    got = adv.gae(reward, value, mask, bootstrap, gamma=gamma, lam=1.0)
    left = mask.flip(1).cumsum(1).flip(1)                                      # valid tokens up to the end, this one included
    wanted = adv.returns_to_go(reward, mask, gamma=gamma) + (gamma**left - value).where(mask, 0)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(adv.value_targets(got, value, mask), (got + value).where(mask, 0))


def test_where_the_environment_wrote_changes_nothing():
    reward, value, mask = holed()
    left = torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)
    args = {"gamma": 0.9, "lam": 0.7}
    bootstrap = torch.full((len(mask),), 0.5, dtype=torch.float64)
    holes = compact(adv.gae(reward, value, mask, bootstrap, **args), mask)
    torch.testing.assert_close(holes, adv.gae(compact(reward, mask), compact(value, mask), left, bootstrap, **args))


@pytest.mark.parametrize("values", [{"gamma": 1.5, "lam": 1.0}, {"gamma": 1.0, "lam": -0.1}, {"gamma": NAN, "lam": 1.0}])
def test_discounts_outside_0_to_1_are_refused(values):
    reward, value, mask = holed()
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        adv.gae(reward, value, mask, torch.zeros(len(mask)), **values)


def test_a_reward_at_the_end_makes_token_forms_the_rollout_forms():
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 1]]).bool()
    reward = f64(1, 0, 0.5)
    token_reward = returns.shape_rewards(reward, torch.zeros(3, 3, dtype=torch.float64), mask, coef=0.1)
    pairs = [
        (adv.returns_to_go(token_reward, mask), adv.reward_itself(reward)),
        (adv.returns_minus_batch_mean(token_reward, mask), adv.minus_batch_mean(reward)),
        (adv.returns_minus_baseline(token_reward, f64(0.3)[0], mask), adv.minus_ema(reward, f64(0.3)[0])),
        (adv.returns_above_greedy(token_reward, f64(1, 1, 0), mask), adv.above_greedy(reward, f64(1, 1, 0))),
    ]
    for token, rollout in pairs:
        torch.testing.assert_close(token, rollout[:, None] * mask)


def test_process_rewards_by_hand():
    reward = torch.full((2, 4), NAN, dtype=torch.float64)
    step = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 1]]).bool()
    reward[step] = f64(1, 0, -1)                                               # mean 0, deviation 1
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]).bool()
    got = adv.standardize_steps(reward, step, mask, eps=0.0)
    assert got.tolist() == [[1, 1, 0, 0], [0, -1, -1, -1]]
    reward[0, 3] = 3                                                           # a step may end on a token that is not trained
    assert adv.standardize_steps(reward, step, mask, eps=0.0)[0, 2] > 0
    equal = torch.full((2, 4), 0.7)
    assert (adv.standardize_steps(equal, torch.ones(2, 4).bool(), mask) == 0).all()


def test_process_rewards_with_one_step_are_the_group_advantage():
    reward, mask = torch.zeros(3, 2, dtype=torch.float64), torch.ones(3, 2).bool()
    reward[:, 1] = f64(1, 0, 0.5)
    got = adv.standardize_steps(reward, torch.tensor([[False, True]] * 3), mask)
    torch.testing.assert_close(got, adv.standardize(reward[:, 1])[:, None].expand(3, 2))


def test_the_teacher_gap_is_zero_at_the_teacher_and_blind_to_the_masked():
    logp, mask = torch.tensor([[-1.0, -INF, -2.0]]), torch.tensor([[True, False, True]])
    assert adv.teacher_gap(logp, logp, mask).tolist() == [[0, 0, 0]]
    assert adv.teacher_gap(logp + 0.5, logp, mask).tolist() == [[0.5, 0, 0.5]]


# normalisation over the step

@pytest.mark.parametrize("ddof", [0, 1])
def test_whitened_tokens_have_mean_0_and_deviation_1(ddof):
    reward, _, mask = holed()
    valid = adv.whiten(reward, mask, ddof=ddof)[mask]
    torch.testing.assert_close(valid.mean(), f64(0)[0])
    torch.testing.assert_close(valid.std(correction=ddof), f64(1)[0])
    torch.testing.assert_close(adv.whiten(reward, mask, ddof=ddof, shift_mean=False)[mask], valid + reward[mask].mean())


@pytest.mark.parametrize("count", [0, 1, 7])
def test_whitening_tokens_that_do_not_differ_gives_exactly_zero(count):
    mask = torch.arange(9) < count
    value = torch.full((9,), 0.7).masked_fill(~mask, NAN)
    assert adv.whiten(value[None], mask[None]).tolist() == [[0.0] * 9]
    assert adv.whiten(value[None], mask[None], shift_mean=False)[0].tolist() == pytest.approx([0.7] * count + [0.0] * (9 - count))


def test_whitening_survives_a_mean_far_above_the_spread_in_float32():
    base = torch.tensor([[-1.0, 0.0, 1.0, 2.0, -2.0]])
    mask = torch.ones(1, 5).bool()
    torch.testing.assert_close(adv.whiten(base / 64 + 4096, mask), adv.whiten(base, mask), rtol=1e-3, atol=1e-3)


# rewards before the advantages

def test_shaped_rewards_add_up_to_the_reward_less_the_kl():
    _, kl, mask = holed()
    kl = kl.nan_to_num(posinf=NAN)
    reward = torch.linspace(-1, 1, len(mask), dtype=torch.float64).masked_fill(~mask.any(1), NAN)
    got = returns.shape_rewards(reward, kl, mask, coef=0.1)
    assert (got[~mask] == 0).all()
    torch.testing.assert_close(got.sum(1), (reward - 0.1 * kl.where(mask, 0).sum(1)).where(mask.any(1), 0))
    last = int(mask[2].nonzero()[-1])
    assert got[2, last] == pytest.approx(float(reward[2] - 0.1 * kl[2, last]))


@pytest.mark.parametrize("cache", [0, 9])
def test_an_overlong_cache_outside_the_length_is_refused(cache):
    with pytest.raises(ValueError, match=f"cache_tokens is {cache}"):
        returns.soft_overlong(torch.tensor([3.0]), max_tokens=8, cache_tokens=cache)


def test_overlong_takes_counts_as_they_are():
    assert returns.soft_overlong(torch.tensor([4, 6, 8, 99]), max_tokens=8, cache_tokens=4).tolist() == [0, -0.5, -1, -1]


def test_the_running_baseline_starts_at_the_first_mean_and_resumes():
    baseline = returns.EmaBaseline(0.75)
    assert baseline.value is None
    assert [baseline.update(mean) for mean in (2.0, 0.0)] == [2.0, 1.5]
    again = returns.EmaBaseline(**json.loads(json.dumps(asdict(baseline))))
    assert again.update(5.5) == baseline.update(5.5) == 2.5


def test_the_running_baseline_refuses_what_would_freeze_or_poison_it():
    for decay in (1.0, -0.1, NAN):
        with pytest.raises(ValueError, match="decay is"):
            returns.EmaBaseline(decay)
    with pytest.raises(ValueError, match="mean reward is nan"):
        returns.EmaBaseline(0.9).update(NAN)


def test_the_decorators_say_what_an_advantage_is_given():
    for fn in (adv.standardize_by_batch, adv.rescale_by_signal, adv.standardize_each):
        assert fn.over_batch and fn.needs_group
    for fn in (adv.standardize, adv.length_weighted, adv.above_greedy, adv.reward_itself):
        assert not hasattr(fn, "over_batch")
    assert not hasattr(adv.minus_batch_mean, "needs_group") and adv.gae.over_batch
