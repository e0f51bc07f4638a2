"""Corrections by hand, where they agree, at the edges."""

from __future__ import annotations

import math

import pytest
import torch

from burnish.algorithms import corrections as c

T, F = True, False
RANGE = {"low": 0.5, "high": 2.0}
ALL = {
    "token_truncate": c.token_truncate, "token_mask": c.token_mask, "sequence_truncate": c.sequence_truncate,
    "sequence_mask": c.sequence_mask, "geometric_mask": c.geometric_mask,
}


def ratios(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


@pytest.mark.parametrize("name", ALL)
def test_without_mismatch_every_weight_is_one(name):
    mask = torch.tensor([[T, F, T], [F, F, F], [T, T, T]])
    weight, kept = ALL[name](torch.zeros(3, 3), mask, **RANGE)
    assert torch.equal(weight, mask.float()) and torch.equal(kept, mask)


@pytest.mark.parametrize(("name", "values", "want"), [
    # rho: 0.4 1 3 | 1.2 1.5; products 1.2 and 1.8; geometric means 1.0627 and 1.3416
    ("token_truncate", {"high": 2.0}, [[0.4, 1, 2], [1.2, 1.5, 0]]),
    ("token_truncate", RANGE, [[0.5, 1, 2], [1.2, 1.5, 0]]),
    ("token_truncate", {"high": math.inf}, [[0.4, 1, 3], [1.2, 1.5, 0]]),
    ("token_mask", RANGE, [[0, 1, 0], [1.2, 1.5, 0]]),
    ("sequence_truncate", {"high": 1.5}, [[1.2, 1.2, 1.2], [1.5, 1.5, 0]]),
    ("sequence_mask", {"low": 0.5, "high": 1.5}, [[1.2, 1.2, 1.2], [0, 0, 0]]),
    ("geometric_mask", {"low": 0.9, "high": 1.1}, [[0.4, 1, 3], [0, 0, 0]]),
    ("geometric_mask", {"low": 0.9, "high": 1.4, "token_cap": 1.3}, [[0.4, 1, 1.3], [1.2, 1.3, 0]]),
])
def test_by_hand(name, values, want):
    mask = torch.tensor([[T, T, T], [T, T, F]])
    weight, kept = ALL[name](ratios([0.4, 1, 3], [1.2, 1.5, 50]), mask, **values)
    torch.testing.assert_close(weight, torch.tensor(want, dtype=torch.float64))
    assert torch.equal(kept, weight > 0)


@pytest.mark.parametrize(("whole", "single"), [
    ("sequence_truncate", "token_truncate"), ("sequence_mask", "token_mask"), ("geometric_mask", "token_mask"),
])
def test_with_one_token_a_rollout_it_is_the_correction_by_tokens(whole, single):
    log_ratio = torch.linspace(-2, 2, 9)[:, None].expand(9, 2)
    mask = torch.tensor([[T, F]]).expand(9, 2)
    for got, want in zip(ALL[whole](log_ratio, mask, **RANGE), ALL[single](log_ratio, mask, **RANGE), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("extreme", [900.0, -900.0, math.inf, -math.inf])
def test_extreme_ratios_and_garbage_under_the_mask(name, extreme):
    log_ratio = torch.tensor([[extreme, 0.1, math.nan], [0.2, 0.1, math.nan]], requires_grad=True)
    mask = torch.tensor([[T, T, F], [T, T, F]])
    weight, kept = ALL[name](log_ratio, mask, **RANGE)
    assert weight.isfinite().all() and not weight.requires_grad and not kept[:, 2].any() and (weight[~kept] == 0).all()
    torch.testing.assert_close(weight[1], ALL[name](log_ratio[1:], mask[1:], **RANGE)[0][0])
    assert kept[0, 0] == ("truncate" in name)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("values", [{"low": 2.0, "high": 1.0}, {"low": -0.1, "high": 2.0}, {"low": 0.5, "high": math.nan}])
def test_senseless_bounds(name, values):
    with pytest.raises(ValueError, match="low and high"):
        ALL[name](torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), **values)
    with pytest.raises(ValueError, match="token_cap"):
        c.geometric_mask(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), **RANGE, token_cap=0.0)


def pooled(weight, mask, parts):
    sums = [c.weight_sums(weight[p], mask[p]) for p in parts]
    return [float(sum(s[i] for s in sums)) for i in range(3)]


def test_normalized_weights_have_mean_one_over_valid_tokens_however_the_step_is_split():
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    weight, kept = c.token_mask(torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64), mask, **RANGE)
    assert kept.sum() < mask.sum()
    splits = [[slice(0, 6)], [slice(0, 2), slice(2, 3), slice(3, 6)]]
    whole, split = (pooled(weight, mask, parts) for parts in splits)
    assert whole == pytest.approx(split)
    total, square, count = split
    again = c.normalize(weight, weight_sum=total, num_tokens=count)
    assert float(again[mask].mean()) == pytest.approx(1) and (again[~kept] == 0).all()
    assert c.effective_sample_frac(weight_sum=total, square_sum=square, num_tokens=count) == pytest.approx(
        float(weight[mask].sum() ** 2 / (mask.sum() * (weight[mask] ** 2).sum()))
    )


def test_effective_sample_frac_by_hand():
    mask = torch.ones(1, 4, dtype=torch.bool)
    for row, want in (([3, 3, 3, 3], 1), ([5, 0, 0, 0], 0.25), ([2, 1, 1, 0], 16 / 24), ([0, 0, 0, 0], 0)):
        weight_sum, square_sum, num = pooled(torch.tensor([row], dtype=torch.float64), mask, [slice(0, 1)])
        assert c.effective_sample_frac(weight_sum=weight_sum, square_sum=square_sum, num_tokens=num) == pytest.approx(want)
    assert c.normalize(torch.zeros(1, 4), weight_sum=0.0, num_tokens=4).tolist() == [[0, 0, 0, 0]]


def test_interpolated_prox():
    cur, gen = torch.tensor([[-1.0, -1.0, -1.0, -1.0, -1.0]], requires_grad=True), torch.full((1, 5), -2.0)
    version, mask = torch.tensor([[7, 6, 5, 3, 9]]), torch.tensor([[T, T, T, T, T]])
    prox, alpha = c.interpolated_prox(cur, gen, version, mask, version_cur=7)
    torch.testing.assert_close(alpha, torch.tensor([[0, 0, 0.5, 0.75, 0]]))
    torch.testing.assert_close(prox, torch.tensor([[-2, -2, -1.5, -1.25, -2]]))
    assert not prox.requires_grad
    dirty, off = torch.full((1, 5), math.nan), torch.zeros(1, 5, dtype=torch.bool)
    assert c.interpolated_prox(dirty, gen, version, off, version_cur=7)[0].tolist() == [[0] * 5]
