"""Rewards before the advantages: a KL and a length penalty inside the reward, rollouts that were cut off, a running baseline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from burnish.algorithms.reduce import masked


def shape_rewards(reward: Tensor, kl: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """r_t = -coef k_t on every valid token, plus R on the last valid one. [B], [B,T] -> [B,T]

    RLHF with the KL in the reward, arXiv:2203.02155 eq. 2. A row without a valid token gets nothing, its R included.
    """
    left = mask.flip(1).cumsum(1).flip(1)
    last = mask & (left == 1)
    return masked(-coef * kl, mask) + masked(reward[:, None].expand(mask.shape), last)


def soft_overlong(num_tokens: Tensor, *, max_tokens: int, cache_tokens: int, factor: float = 1.0) -> Tensor:
    """factor clip((max - cache - n) / cache, -1, 0): 0 up to max - cache tokens, then down to -factor at max and beyond. [B] -> [B]

    DAPO, arXiv:2503.14476 eq. 13. To be added to the reward.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(f"cache_tokens is {cache_tokens}; it must lie between 1 and max_tokens ({max_tokens})")
    return factor * ((max_tokens - cache_tokens - num_tokens) / cache_tokens).clamp(-1, 0)


def without_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """The mask with every token off in rollouts that were cut off. [B,T], [B] -> [B,T]. DAPO, arXiv:2503.14476 section 3.4."""
    return mask & ~truncated[:, None]


@dataclass(slots=True)
class EmaBaseline:
    """b <- decay b + (1 - decay) mean reward of the step. `value` is the whole state; None before the first update.

    Williams 1992, reinforcement comparison. A step is compared with `value` as it was before that step's update.
    """

    decay: float
    value: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay is {self.decay}; it must be at least 0 and below 1, or the baseline never moves")

    def update(self, reward_mean: float) -> float:
        if not math.isfinite(reward_mean):
            raise ValueError(f"the mean reward is {reward_mean}; a baseline cannot take it in")
        self.value = reward_mean if self.value is None else self.decay * self.value + (1 - self.decay) * reward_mean
        return self.value
