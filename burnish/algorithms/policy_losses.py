"""Policy losses: arrays in, one number per token out. No mask, no mean, no logging.

Columns a loss may name: logp_cur and entropy (differentiable), logp_gen, logp_prox, logp_ref, adv, mask; all [B, T].
Values at masked positions arrive as 0. A loss may carry an attribute `clipped`, a function of the same arguments
that tells which tokens its clip left without a gradient; it is reported as train/clip_frac.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _bounded_ratio(log_ratio: Tensor, adv: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None) -> Tensor:
    """r held to the bound that A makes binding: at most 1+eps_high where A >= 0, else at least 1-eps_low and at most dual_clip.

    Bounded before exp: exp of a large log-ratio is inf, and the zero gradient of a clamp behind it would be 0 * inf.
    """
    low = math.log(1 - eps_low) if eps_low < 1 else -math.inf
    high = math.inf if dual_clip is None else math.log(dual_clip)
    return torch.exp(torch.where(adv < 0, log_ratio.clamp(low, high), log_ratio.clamp(max=math.log1p(eps_high))))


def _outside(log_ratio: Tensor, adv: Tensor, eps_low: float, eps_high: float) -> Tensor:
    low = math.log(1 - eps_low) if eps_low < 1 else -math.inf
    return ((adv > 0) & (log_ratio > math.log1p(eps_high))) | ((adv < 0) & (log_ratio < low))


def ppo_clip(
    logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> Tensor:
    """max(-r A, -clip(r, 1-eps_low, 1+eps_high) A), r = pi_cur / pi_prox. [B,T] -> [B,T]

    PPO, arXiv:1707.06347 eq. 7; separate bounds from DAPO, arXiv:2503.14476. With dual_clip = c > 1, where A < 0 the
    loss is at most -c A (arXiv:1912.09729 eq. 5).
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is a ratio above 1, not {dual_clip}")
    return -adv * _bounded_ratio(logp_cur - logp_prox, adv, eps_low, eps_high, dual_clip)


def _ppo_clipped(
    logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> Tensor:
    """True where the clipped branch of ppo_clip is strictly the larger one, so the token has no gradient. [B,T] -> [B,T]"""
    return _outside(logp_cur - logp_prox, adv, eps_low, eps_high)


def _ppo_dual_clipped(
    logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> Tensor:
    """True where dual_clip bounds the loss, so the token has no gradient either. [B,T] -> [B,T]"""
    return (adv < 0) & (logp_cur - logp_prox > (math.inf if dual_clip is None else math.log(dual_clip)))


ppo_clip.clipped = _ppo_clipped
ppo_clip.dual_clipped = _ppo_dual_clipped


def reinforce(logp_cur: Tensor, adv: Tensor) -> Tensor:
    """-A log pi_cur. [B,T] -> [B,T]. REINFORCE (Williams 1992); also the loss of GPG, arXiv:2504.02546."""
    return -adv * logp_cur


def importance_sampling(logp_cur: Tensor, logp_prox: Tensor, adv: Tensor) -> Tensor:
    """-A r, r = pi_cur / pi_prox, without a clip. [B,T] -> [B,T]"""
    return -adv * torch.exp(logp_cur - logp_prox)
