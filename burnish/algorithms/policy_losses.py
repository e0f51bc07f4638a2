"""Policy losses: arrays in, one number per token out. No mask, no mean, no logging.

Columns a loss may name: logp_cur and entropy (differentiable), logp_gen, logp_prox, logp_ref, adv, mask; all [B, T].
Values at masked positions arrive as 0. A loss may carry an attribute `clipped`, a function of the same arguments
that tells which tokens its clip left without a gradient; it is reported as train/clip_frac.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ppo_clip(
    logp_cur: Tensor, logp_gen: Tensor, adv: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> Tensor:
    """max(-r A, -clip(r, 1-eps_low, 1+eps_high) A), r = pi_cur / pi_gen. [B,T] -> [B,T]

    PPO, arXiv:1707.06347 eq. 7; separate bounds from DAPO, arXiv:2503.14476. With dual_clip = c > 1, where A < 0 the
    loss is at most -c A (arXiv:1912.09729 eq. 5).
    """
    ratio = torch.exp(logp_cur - logp_gen)
    loss = torch.maximum(-ratio * adv, -ratio.clamp(1 - eps_low, 1 + eps_high) * adv)
    if dual_clip is None:
        return loss
    return torch.where(adv < 0, torch.minimum(loss, -dual_clip * adv), loss)


def _ppo_clipped(
    logp_cur: Tensor, logp_gen: Tensor, adv: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> Tensor:
    """True where the clipped branch of ppo_clip is strictly the larger one, so the token has no gradient. [B,T] -> [B,T]"""
    ratio = torch.exp(logp_cur - logp_gen)
    return -ratio.clamp(1 - eps_low, 1 + eps_high) * adv > -ratio * adv


ppo_clip.clipped = _ppo_clipped


def reinforce(logp_cur: Tensor, adv: Tensor) -> Tensor:
    """-A log pi_cur. [B,T] -> [B,T]. REINFORCE (Williams 1992); also the loss of GPG, arXiv:2504.02546."""
    return -adv * logp_cur


def importance_sampling(logp_cur: Tensor, logp_gen: Tensor, adv: Tensor) -> Tensor:
    """-A r, r = pi_cur / pi_gen, without a clip. [B,T] -> [B,T]"""
    return -adv * torch.exp(logp_cur - logp_gen)
