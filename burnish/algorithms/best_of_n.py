"""The best of several samples of one task. pass@k is `burnish.evaluate.measure.pass_at_k`."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def best_index(reward: Tensor) -> Tensor:
    """The place of the highest reward, the first of equal ones. [...,N] -> [...]

    Raises ValueError for NaN, which compares with nothing.
    """
    if bool(reward.isnan().any()):
        raise ValueError("a reward is NaN; leave out what could not be scored")
    n = reward.shape[-1]
    place = torch.arange(n, device=reward.device).expand(reward.shape)
    # argmax may return any of equal values
    return torch.where(reward == reward.amax(-1, keepdim=True), place, n).amin(-1)


def expected_max(reward: Tensor, *, n: int) -> Tensor:
    """E[highest of n], unbiased from N samples: sum_i C(i-1, n-1) / C(N, n) R_(i), R_(i) the i-th smallest. [...,N] -> [...]

    Order statistics: the mean over all choices of n of the N samples. For rewards of 0 and 1 it is pass@n (arXiv:2107.03374 eq. 1).
    Raises ValueError unless 1 <= n <= N.
    """
    num_samples = reward.shape[-1]
    if not 1 <= n <= num_samples:
        raise ValueError(f"n is {n}; it needs at least 1 and at most the {num_samples} samples")
    weights = [math.comb(i, n - 1) / math.comb(num_samples, n) for i in range(n - 1, num_samples)]
    weight = torch.tensor(weights, dtype=torch.result_type(reward, 1.0), device=reward.device)
    return (reward.sort(-1).values[..., n - 1 :] * weight).sum(-1)
