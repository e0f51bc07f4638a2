"""Rewards of one group -> advantages of that group. [G] -> [G].

A group whose rewards are all equal gives exactly 0: it is tested by max == min, because in float32 the mean of seven
times 0.7 is off by one ulp, and an ulp over a small eps is no longer small.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def group_baseline(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Marks an advantage that compares samples of one task: with one sample it is always 0."""
    fn.needs_group = True
    return fn


def _constant(reward: Tensor) -> bool:
    return reward.numel() < 2 or bool(reward.max() == reward.min())


@group_baseline
def standardize(reward: Tensor, *, eps: float = 1e-4, ddof: int = 1) -> Tensor:
    """(R - mean R) / (std R + eps). [G] -> [G]

    GRPO, arXiv:2402.03300 eq. 3. ddof 1 is the sample standard deviation that every public implementation uses.
    """
    if _constant(reward):
        return torch.zeros_like(reward)
    return (reward - reward.mean()) / (reward.std(correction=ddof) + eps)


@group_baseline
def center(reward: Tensor) -> Tensor:
    """R - mean R. [G] -> [G]. Dr. GRPO, arXiv:2503.20783."""
    if _constant(reward):
        return torch.zeros_like(reward)
    return reward - reward.mean()


@group_baseline
def leave_one_out(reward: Tensor) -> Tensor:
    """R_i - mean of the others = G/(G-1) (R_i - mean R). [G] -> [G]. RLOO, arXiv:2402.14740."""
    if _constant(reward):
        return torch.zeros_like(reward)
    n = reward.numel()
    return (reward - reward.mean()) * (n / (n - 1))


def reward_itself(reward: Tensor) -> Tensor:
    """A = R, without a baseline. [G] -> [G]. REINFORCE (Williams 1992)."""
    return reward.clone()
