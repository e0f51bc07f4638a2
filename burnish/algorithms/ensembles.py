"""Scores of several reward models -> one. Members come first: [M, ...] -> [...].

arXiv:2310.02743 compares mean, worst case and uncertainty-weighted. Variance and standard deviation are those of the
members themselves (divided by M), so that one member alone has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mean(score: Tensor) -> Tensor:
    """1/M sum_m s_m. [M,...] -> [...]"""
    return score.mean(0)


def minimum(score: Tensor) -> Tensor:
    """min_m s_m: no higher than the most doubtful member. [M,...] -> [...]"""
    return score.amin(0)


def median(score: Tensor) -> Tensor:
    """The middle member, or the mean of the two middle ones. [M,...] -> [...]"""
    return torch.quantile(score, 0.5, dim=0)


def mean_minus_variance(score: Tensor, *, coef: float) -> Tensor:
    """mean_m s_m - coef var_m s_m. [M,...] -> [...]. arXiv:2310.02743, uncertainty-weighted optimization."""
    return score.mean(0) - coef * score.var(0, correction=0)


def mean_minus_std(score: Tensor, *, coef: float) -> Tensor:
    """mean_m s_m - coef std_m s_m: the penalty has the unit of the score. [M,...] -> [...]"""
    return score.mean(0) - coef * score.std(0, correction=0)


def weighted_mean(score: Tensor, *, weights: Sequence[float]) -> Tensor:
    """sum_m w_m s_m / sum_m w_m. [M,...], M weights -> [...]

    Raises ValueError for a wrong number of weights, a negative one, or if their sum is 0.
    """
    if len(weights) != len(score):
        raise ValueError(f"{len(weights)} weights for {len(score)} members")
    w = torch.as_tensor(weights, dtype=score.dtype, device=score.device)
    if bool((w < 0).any()) or not w.sum() > 0:
        raise ValueError(f"weights must be 0 or more with a sum above 0: {w.tolist()}")
    return torch.tensordot(w / w.sum(), score, dims=1)
