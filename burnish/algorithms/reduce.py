"""Per-token losses -> the loss of the step, divided by counts of the whole step that are given as arguments.

So a micro-batch adds its share, and splitting a step changes nothing. `mask` is True on trained tokens. [B,T] -> []
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked(value: Tensor, mask: Tensor) -> Tensor:
    """value where mask, else exactly 0 with no gradient, whatever stood there (NaN and inf too). [B,T] -> [B,T]"""
    return torch.where(mask, value, torch.zeros_like(value))


def token_mean(loss: Tensor, mask: Tensor, *, num_tokens: int, num_rollouts: int) -> Tensor:
    """sum of l / all trained tokens of the step: every token weighs the same. DAPO, arXiv:2503.14476 eq. 8."""
    return masked(loss, mask).sum() / max(num_tokens, 1)


def rollout_mean(loss: Tensor, mask: Tensor, *, num_tokens: int, num_rollouts: int) -> Tensor:
    """1/N sum_i 1/n_i sum_t l: every rollout weighs the same. GRPO, arXiv:2402.03300 eq. 3."""
    tokens = mask.sum(-1).clamp(min=1)
    return (masked(loss, mask).sum(-1) / tokens).sum() / max(num_rollouts, 1)


def rollout_sum(loss: Tensor, mask: Tensor, *, num_tokens: int, num_rollouts: int) -> Tensor:
    """1/N sum_i sum_t l: REINFORCE as it is derived."""
    return masked(loss, mask).sum() / max(num_rollouts, 1)


def rollout_sum_over(loss: Tensor, mask: Tensor, *, num_tokens: int, num_rollouts: int, length: int) -> Tensor:
    """1/(N C) sum_i sum_t l with a constant C, the longest completion allowed. Dr. GRPO, arXiv:2503.20783."""
    return masked(loss, mask).sum() / max(num_rollouts * length, 1)


def token_sum(loss: Tensor, mask: Tensor, *, num_tokens: int, num_rollouts: int) -> Tensor:
    """sum of l."""
    return masked(loss, mask).sum()
