"""Value losses: what a critic said and what came -> one number per token. No mean, no logging."""

from __future__ import annotations

import torch
from torch import Tensor


def _held(value_cur: Tensor, value_prox: Tensor, clip: float) -> Tensor:
    if not clip > 0:
        raise ValueError(f"clip is a distance above 0, or null for no clip; not {clip}")
    return torch.clamp(value_cur, value_prox - clip, value_prox + clip)


def clipped_error(value_cur: Tensor, value_prox: Tensor, ret: Tensor, *, clip: float | None) -> Tensor:
    """max((V - R)^2, (clip(V, V_prox - clip, V_prox + clip) - R)^2) / 2; without a clip (V - R)^2 / 2. [B,T] -> [B,T]

    V_prox is the critic at the start of the step's updates, R the return. Value clipping of the first PPO implementation
    (openai/baselines), which the paper, arXiv:1707.06347, does not have.
    """
    error = (value_cur - ret) ** 2
    if clip is None:
        return 0.5 * error
    return 0.5 * torch.maximum(error, (_held(value_cur, value_prox, clip) - ret) ** 2)


def _clipped(value_cur: Tensor, value_prox: Tensor, ret: Tensor, *, clip: float | None) -> Tensor:
    """True where the clipped branch is strictly the larger one, so the token has no gradient. [B,T] -> [B,T]"""
    if clip is None:
        return torch.zeros_like(ret, dtype=torch.bool)
    return (_held(value_cur, value_prox, clip) - ret) ** 2 > (value_cur - ret) ** 2


clipped_error.clipped = _clipped
