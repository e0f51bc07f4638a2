"""Losses of reward models, ensembles of them, and the best of several samples."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from burnish.algorithms import ensembles
from burnish.algorithms.best_of_n import best_index, expected_max
from burnish.algorithms.reward_losses import bradley_terry, centering, ordinal, prefers_chosen, squared_error, step_cross_entropy
from burnish.evaluate.measure import pass_at_k

INF, NAN = float("inf"), float("nan")
close = torch.testing.assert_close


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_bradley_terry_by_hand():
    zero = t(0.0)
    close(bradley_terry(zero, zero), t(math.log(2)))
    close(bradley_terry(t(2.0), t(0.5), margin=t(0.5)), t(math.log1p(math.exp(-1))))
    close(bradley_terry(t(2.0, -1.0), t(0.5, 3.0), margin=t(0.0, 0.0)), bradley_terry(t(2.0, -1.0), t(0.5, 3.0)))
    close(centering(t(2.0, -1.0), t(0.5, 1.0)), t(6.25, 0.0))
    assert prefers_chosen(t(1.0, 1.0, 0.0), t(0.0, 1.0, 1.0)).tolist() == [True, False, False]


def test_bradley_terry_does_not_overflow():
    """log(1 + exp(gap)) as written is inf in float32 from a gap of 89 on."""
    chosen, rejected = torch.tensor([-1e4, 1e4], requires_grad=True), torch.tensor([1e4, -1e4])
    loss = bradley_terry(chosen, rejected)
    close(loss, torch.tensor([2e4, 0.0]))
    close(torch.autograd.grad(loss.sum(), chosen)[0], torch.tensor([-1.0, 0.0]))


def test_squared_error_does_not_see_masked_entries():
    score = torch.tensor([[1.0, NAN, 5.0], [2.0, INF, 0.0]], requires_grad=True)
    target, mask = torch.tensor([[3.0, 1.0, NAN], [2.5, 1.0, INF]]), torch.tensor([[True, False, False], [True, False, False]])
    loss = squared_error(score, target, mask)
    close(loss, torch.tensor([[4.0, 0.0, 0.0], [0.25, 0.0, 0.0]]))
    close(torch.autograd.grad(loss.sum(), score)[0], torch.tensor([[-4.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("thresholds", [(0.3,), (-1.0, -0.999, 4.0)])
def test_ordinal_is_a_distribution(thresholds):
    score, thresholds = t(-3.0, 0.0, 2.5), t(*thresholds)
    prob = torch.stack([torch.exp(-ordinal(score, torch.full((3,), k), thresholds)) for k in range(len(thresholds) + 1)])
    close(prob.sum(0), torch.ones(3, dtype=torch.float64))
    close(prob.cumsum(0)[:-1], torch.sigmoid(thresholds[:, None] - score))


def test_ordinal_of_two_classes_is_bradley_terry_against_the_threshold():
    score = t(-2.0, 0.1, 3.0)
    close(ordinal(score, torch.tensor([1, 1, 1]), t(0.4)), bradley_terry(score, t(0.4)))


@pytest.mark.parametrize("label", [0, 1, 2])
def test_ordinal_stays_finite_far_out(label):
    """sigmoid(a) - sigmoid(b) is 0 there, and its log -inf."""
    score = torch.tensor([-1e4, -60.0, 60.0, 1e4], requires_grad=True)
    thresholds = torch.tensor([-1.0, 1.0], requires_grad=True)
    loss = ordinal(score, torch.full((4,), label), thresholds)
    grads = torch.autograd.grad(loss.sum(), (score, thresholds))
    assert all(bool(x.isfinite().all()) for x in (loss, *grads))
    inside = math.log1p(-math.exp(-2))      # s = 60, k = 1: log sigmoid(-59) + log sigmoid(61) + log(1 - exp(-2))
    want = {0: [0, 0, 61, 10001], 1: [9999 - inside, 59 - inside, 59 - inside, 9999 - inside], 2: [10001, 61, 0, 0]}
    close(loss, torch.tensor(want[label], dtype=torch.float32))


@pytest.mark.parametrize(("label", "thresholds", "words"), [
    (0, (1.0, 1.0), "increase"), (0, (2.0, 1.0), "increase"), (0, (0.0, NAN), "increase"),
    (3, (0.0, 1.0), "labels 0 to 2"), (-1, (0.0,), "labels 0 to 1"),
])
def test_ordinal_refuses(label, thresholds, words):
    with pytest.raises(ValueError, match=words):
        ordinal(t(0.0), torch.tensor([label]), t(*thresholds))


def test_step_cross_entropy_does_not_see_positions_without_a_label():
    logits = torch.tensor([[[0.0, 0.0], [NAN, INF], [1.0, 3.0]]], requires_grad=True)
    loss = step_cross_entropy(logits, torch.tensor([[0, -100, 1]]), ignore_label=-100)
    close(loss, torch.tensor([[math.log(2), 0.0, math.log1p(math.exp(-2))]]))
    grad = torch.autograd.grad(loss.sum(), logits)[0]
    close(grad[0, :2], torch.tensor([[-0.5, 0.5], [0.0, 0.0]]))


def test_step_cross_entropy_without_any_label():
    logits = torch.randn(2, 3, 4, requires_grad=True)
    loss = step_cross_entropy(logits, torch.full((2, 3), -1), ignore_label=-1)
    close(loss, torch.zeros(2, 3))
    close(torch.autograd.grad(loss.sum(), logits)[0], torch.zeros(2, 3, 4))


def test_two_step_classes_are_bradley_terry_of_their_logits():
    logits = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    close(step_cross_entropy(logits, torch.ones(5, dtype=torch.long), ignore_label=-100), bradley_terry(logits[:, 1], logits[:, 0]))


COMBINE = {
    "mean": ensembles.mean, "minimum": ensembles.minimum, "median": ensembles.median,
    "mean_minus_variance": lambda s: ensembles.mean_minus_variance(s, coef=3.0),
    "mean_minus_std": lambda s: ensembles.mean_minus_std(s, coef=3.0),
    "weighted_mean": lambda s: ensembles.weighted_mean(s, weights=[0.7] * len(s)),
}


@pytest.mark.parametrize("name", COMBINE)
@pytest.mark.parametrize("members", [1, 4])
def test_members_that_agree_are_one(name, members):
    score = t(0.25, -3.0, 7.5)
    close(COMBINE[name](score.expand(members, 3)), score)


def test_ensembles_by_hand():
    score = t(1.0, 2.0, 6.0)[:, None]        # mean 3, variance (4 + 1 + 9) / 3
    assert ensembles.median(score).item() == 2.0
    assert ensembles.mean_minus_variance(score, coef=0.3).item() == pytest.approx(3 - 1.4)
    assert ensembles.mean_minus_std(score, coef=2.0).item() == pytest.approx(3 - 2 * math.sqrt(14 / 3))
    assert ensembles.weighted_mean(score, weights=[2, 1, 1]).item() == 2.5


@pytest.mark.parametrize("name", COMBINE)
def test_a_member_that_fails_shows(name):
    assert COMBINE[name](t(1.0, NAN, 2.0)[:, None]).isnan().all()


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, NAN]])
def test_weights_that_make_no_sense(weights):
    with pytest.raises(ValueError, match="weights"):
        ensembles.weighted_mean(t(1.0, 2.0)[:, None], weights=weights)


def test_best_index_is_the_first_of_equal_ones():
    reward = torch.zeros(3, 1000)
    reward[1, 700:] = 1.0
    reward[2] = -INF
    assert best_index(reward).tolist() == [0, 700, 0]
    assert best_index(torch.tensor([0, 2, 2])).item() == 1
    with pytest.raises(ValueError, match="NaN"):
        best_index(torch.tensor([0.0, NAN]))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_expected_max_is_the_mean_over_all_choices(n):
    reward = t(0.3, -1.0, 0.3, 4.0, 2.0)
    want = [max(c) for c in itertools.combinations(reward.tolist(), n)]
    assert expected_max(reward, n=n).item() == pytest.approx(sum(want) / len(want))


def test_expected_max_of_zeros_and_ones_is_pass_at_k():
    reward = torch.tensor([0, 1, 0, 0, 1, 0])
    for k in range(1, 7):
        assert expected_max(reward, n=k).item() == pytest.approx(pass_at_k(6, 2, k))


def test_expected_max_of_many_samples_and_of_minus_inf():
    # C(2000, 1000) is beyond float64; and the lowest of the samples has weight 0
    assert expected_max(torch.cat([t(-INF), torch.ones(1999, dtype=torch.float64)]), n=1000).item() == pytest.approx(1.0)
    for n in (0, 3):
        with pytest.raises(ValueError, match="at most the 2 samples"):
            expected_max(t(0.0, 1.0), n=n)
