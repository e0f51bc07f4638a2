"""Running statistics of rewards against a direct computation over all values."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import asdict

import pytest
import torch

from burnish.algorithms.running import EmaNorm, RunningNorm

OFFSET = 1e8    # E[x^2] - E[x]^2 in float64 leaves nothing of a variance of 1 here
BATCHES = [OFFSET + torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 7, 2, 40)]


def running(*batches, **settings):
    norm = RunningNorm(**{"eps": 1e-8, "ddof": 1, **settings})
    for batch in batches:
        norm.update(batch)
    return norm


def test_mean_and_variance_at_a_large_offset():
    norm = running(*BATCHES)
    every = torch.cat(BATCHES).tolist()
    assert (norm.count, norm.mean) == (50, pytest.approx(statistics.fmean(every), rel=1e-15))
    assert norm.var == pytest.approx(statistics.variance([x - OFFSET for x in every]), rel=1e-6)    # x - OFFSET is exact
    assert running(*BATCHES, ddof=0).var == pytest.approx(statistics.pvariance([x - OFFSET for x in every]), rel=1e-6)


def test_merging_in_any_order_is_the_same():
    for order in itertools.permutations(BATCHES):
        one, two = running(*order[:2]), running(*order[2:])
        one.merge(two)
        whole = running(*BATCHES)
        assert (one.count, one.mean, one.var) == (whole.count, pytest.approx(whole.mean, rel=1e-15), pytest.approx(whole.var, rel=1e-6))


def test_merging_with_nothing_seen_changes_nothing():
    one, empty = running(*BATCHES), running()
    before = asdict(one)
    one.merge(empty)
    one.update(torch.zeros(0))
    assert asdict(one) == before
    empty.merge(one)
    assert asdict(empty) == before


def test_the_batch_counts_before_it_is_normalised():
    norm = running(torch.tensor([1.0, 3.0]))
    got = norm(torch.tensor([[5.0, 7.0]]))       # of 1 3 5 7: mean 4, variance 20/3
    torch.testing.assert_close(got, torch.tensor([[1.0, 3.0]]) / (20 / 3) ** 0.5)
    scaled = running(torch.tensor([1.0, 3.0]), center=False)
    torch.testing.assert_close(scaled(torch.tensor([5.0, 7.0])), torch.tensor([5.0, 7.0]) / (20 / 3) ** 0.5)


def test_equal_rewards_become_zero():
    assert running()(torch.tensor([0.7] * 7)).tolist() == [0.0] * 7
    assert running()(torch.tensor([3.0])).tolist() == [0.0]
    assert running().normalize(torch.tensor([], dtype=torch.float32)).tolist() == []


def test_whole_numbers_are_not_rounded():
    torch.testing.assert_close(running()(torch.tensor([0, 1, 1])), running()(torch.tensor([0.0, 1.0, 1.0])))


@pytest.mark.parametrize("make", [lambda **s: RunningNorm(eps=1e-4, ddof=1, **s), lambda **s: EmaNorm(decay=0.9, eps=1e-4, ddof=1, **s)])
def test_the_state_goes_through_json(make):
    norm = make()
    norm.update(torch.tensor([1.5, 2.0, -1.0]))
    again = type(norm)(**json.loads(json.dumps(asdict(norm))))
    nxt = torch.tensor([0.3, 9.0])
    assert again(nxt).tolist() == norm(nxt).tolist() and asdict(again) == asdict(norm)


@pytest.mark.parametrize("make", [lambda **s: RunningNorm(ddof=1, **s), lambda **s: EmaNorm(decay=0.9, ddof=1, **s)])
def test_what_would_spoil_the_statistics_is_refused(make):
    norm = make(eps=1e-8)
    norm.update(torch.tensor([1.0, 2.0]))
    before = asdict(norm)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            norm.update(torch.tensor([1.0, bad]))
    assert asdict(norm) == before
    with pytest.raises(ValueError, match="eps"):
        make(eps=0.0)


def test_ema_by_hand():
    norm = EmaNorm(decay=0.75, eps=1e-8, ddof=0)
    norm.update(torch.tensor([1.0, 3.0]))            # mean 2, variance 1
    norm.update(torch.tensor([10.0, 10.0]))          # mean 10, variance 0
    assert (norm.mean, norm.var) == (4.0, 0.75)
    torch.testing.assert_close(norm.normalize(torch.tensor([5.5])), torch.tensor([3**0.5]))


def test_ema_without_memory_is_the_batch_alone():
    norm, batch = EmaNorm(decay=0.0, eps=1e-8, ddof=1), torch.tensor([0.5, 2.0, -4.0])
    norm.update(torch.tensor([100.0, -3.0]))
    torch.testing.assert_close(norm(batch), RunningNorm(eps=1e-8, ddof=1)(batch))


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_ema_refuses_a_decay_that_never_learns(decay):
    with pytest.raises(ValueError, match="decay"):
        EmaNorm(decay=decay, eps=1e-8, ddof=1)
