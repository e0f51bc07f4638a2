"""Policy losses: arrays in, one number per token out. No mean, no logging.

Columns a loss may name: logp_cur and entropy (differentiable), logp_prox, logp_gen, logp_ref, adv, mask; all [B,T].
Values at masked positions arrive as 0. A loss with one value a rollout puts it at every token, so that rollout_mean
gives the mean over rollouts. A loss may carry an attribute `clipped`, a function of the same arguments that tells which
tokens its clip left without a gradient (cispo: whose weight it changed); it is reported as train/clip_frac.

Bounds are put on the log of a ratio, before exp: exp of a large log-ratio is inf, and the zero gradient of a clamp
behind it would be 0 * inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish.algorithms.reduce import masked


def _surrogate(log_ratio: Tensor, adv: Tensor) -> Tensor:
    """-A e^log_ratio, and 0 where A is 0 even if the ratio overflows."""
    return -adv * torch.exp(torch.where(adv == 0, 0.0, log_ratio))


def _log_bounds(eps_low: float, eps_high: float) -> tuple[float, float]:
    """Logs of 1-eps_low and 1+eps_high; no lower bound from eps_low = 1 on."""
    if not (eps_low >= 0 and eps_high >= 0):
        raise ValueError(f"eps_low and eps_high are distances from the ratio 1, not negative; got {eps_low} and {eps_high}")
    return (math.log1p(-eps_low) if eps_low < 1 else -math.inf), math.log1p(eps_high)


def _bounded(log_ratio: Tensor, adv: Tensor, low: float, high: float, cap: float = math.inf) -> Tensor:
    """The log-ratio under the bound that max(-r A, -clip(r) A) makes binding: above where A >= 0, below where A < 0 (and cap above)."""
    return torch.where(adv < 0, log_ratio.clamp(low, cap), log_ratio.clamp(max=high))


def _outside(log_ratio: Tensor, adv: Tensor, low: float, high: float) -> Tensor:
    """True where _bounded changed the log-ratio of a token that has an advantage; a cap is not counted."""
    return ((adv > 0) & (log_ratio > high)) | ((adv < 0) & (log_ratio < low))


def _row_sum(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return masked(log_ratio, mask).sum(-1, keepdim=True)


def _row_mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return _row_sum(log_ratio, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def ppo_clip(
    logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> Tensor:
    """max(-r A, -clip(r, 1-eps_low, 1+eps_high) A), r = pi_cur / pi_prox. [B,T] -> [B,T]

    PPO, arXiv:1707.06347 eq. 7; separate bounds from DAPO, arXiv:2503.14476. With dual_clip = c > 1, where A < 0 the
    loss is at most -c A (arXiv:1912.09729 eq. 5). Times a weight of corrections.py it is decoupled PPO, arXiv:2110.00641.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is a ratio above 1, not {dual_clip}")
    cap = math.inf if dual_clip is None else math.log(dual_clip)
    return _surrogate(_bounded(logp_cur - logp_prox, adv, *_log_bounds(eps_low, eps_high), cap), adv)


def _ppo_clipped(
    logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> Tensor:
    """True where the clipped branch is strictly the larger one. [B,T] -> [B,T]"""
    return _outside(logp_cur - logp_prox, adv, *_log_bounds(eps_low, eps_high))


def _ppo_dual_clipped(
    logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> Tensor:
    """True where dual_clip bounds the loss. [B,T] -> [B,T]"""
    return (adv < 0) & (logp_cur - logp_prox > (math.inf if dual_clip is None else math.log(dual_clip)))


ppo_clip.clipped = _ppo_clipped
ppo_clip.dual_clipped = _ppo_dual_clipped


def reinforce(logp_cur: Tensor, adv: Tensor) -> Tensor:
    """-A log pi_cur. [B,T] -> [B,T]. REINFORCE (Williams 1992); also the loss of GPG, arXiv:2504.02546."""
    return -adv * logp_cur


def importance_sampling(logp_cur: Tensor, logp_prox: Tensor, adv: Tensor) -> Tensor:
    """-A r, r = pi_cur / pi_prox, without a clip. [B,T] -> [B,T]"""
    return _surrogate(logp_cur - logp_prox, adv)


def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """exp(mean_t log r), the geometric mean of a rollout's token ratios; 1 for an empty row. [B,T] -> [B]. arXiv:2507.18071 eq. 7."""
    return torch.exp(_row_mean(log_ratio, mask)).squeeze(-1)


def gspo(logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, mask: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """max(-s A, -clip(s, 1-eps_low, 1+eps_high) A), s = exp(mean_t log pi_cur / pi_prox) of the rollout. [B,T] -> [B,T]

    GSPO, arXiv:2507.18071 eq. 5-7.
    """
    log_s = _row_mean(logp_cur - logp_prox, mask).expand_as(adv)
    return _surrogate(_bounded(log_s, adv, *_log_bounds(eps_low, eps_high)), adv)


def gspo_token(logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, mask: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """gspo with s_t = sg(s) pi_cur / sg(pi_cur): the value of s, the gradient of the token alone. [B,T] -> [B,T]

    GSPO-token, arXiv:2507.18071 eq. 13-14. Reduced by rollout_mean it has gspo's gradient where a rollout has one advantage.
    """
    log_s = _row_mean(logp_cur - logp_prox, mask).detach() + (logp_cur - logp_cur.detach())
    return _surrogate(_bounded(log_s, adv, *_log_bounds(eps_low, eps_high)), adv)


def _gspo_clipped(logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, mask: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """True at every token whose rollout's ratio is clipped. [B,T] -> [B,T]"""
    return _outside(_row_mean(logp_cur - logp_prox, mask), adv, *_log_bounds(eps_low, eps_high))


gspo.clipped = gspo_token.clipped = _gspo_clipped


def _cispo_clipped(logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, *, ratio_min: float, ratio_max: float) -> Tensor:
    """True where the weight was changed; these tokens keep a gradient. [B,T] -> [B,T]"""
    ratio = torch.exp(logp_cur - logp_prox)
    return (ratio < ratio_min) | (ratio > ratio_max)


def cispo(logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, *, ratio_min: float, ratio_max: float) -> Tensor:
    """-sg(clip(r, ratio_min, ratio_max)) A log pi_cur, r = pi_cur / pi_prox; the bounds are ratios. [B,T] -> [B,T]

    CISPO, MiniMax-M1, arXiv:2506.13585 eq. 4-5; without a lower bound (ratio_min 0) in ScaleRL, arXiv:2510.13786.
    """
    if not 0 <= ratio_min <= ratio_max < math.inf:
        raise ValueError(f"ratio_min and ratio_max are finite ratios with 0 <= ratio_min <= ratio_max; got {ratio_min} and {ratio_max}")
    weight = torch.exp(logp_cur.detach() - logp_prox).clamp(ratio_min, ratio_max)
    return -weight * adv * logp_cur


cispo.clipped = _cispo_clipped


def sapo(logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, *, tau_pos: float, tau_neg: float) -> Tensor:
    """-A 4/tau sigmoid(tau (r - 1)), r = pi_cur / pi_prox, tau = tau_pos where A > 0, else tau_neg. [B,T] -> [B,T]

    SAPO, arXiv:2511.20347: a gate with the slope of r at r = 1, which closes smoothly away from it.
    """
    if not (0 < tau_pos < math.inf and 0 < tau_neg < math.inf):
        raise ValueError(f"tau_pos and tau_neg are finite and above 0; got {tau_pos} and {tau_neg}")
    half_range = math.log(torch.finfo(logp_cur.dtype).max) / 2    # r stays finite there, and the sigmoid is 1 long before
    ratio = torch.exp((logp_cur - logp_prox).clamp(max=half_range))
    tau = torch.where(adv > 0, torch.full_like(adv, tau_pos), tau_neg)
    return -adv * (4 / tau) * torch.sigmoid(tau * (ratio - 1))


def _dppo_dropped(logp_cur: Tensor, logp_gen: Tensor, adv: Tensor, *, delta_low: float, delta_high: float) -> Tensor:
    """True where the token is dropped. [B,T] -> [B,T]"""
    moved = torch.exp(logp_cur) - torch.exp(logp_gen)
    return ((adv > 0) & (moved > delta_high)) | ((adv < 0) & (moved < -delta_low))


def dppo_tv(logp_cur: Tensor, logp_gen: Tensor, adv: Tensor, *, delta_low: float, delta_high: float) -> Tensor:
    """-A pi_cur / pi_gen; 0 where A > 0 and pi_cur - pi_gen > delta_high, or A < 0 and pi_cur - pi_gen < -delta_low. [B,T] -> [B,T]

    DPPO with the binary total variation, arXiv:2602.04879: a trust region in probabilities instead of ratios.
    """
    if not (delta_low >= 0 and delta_high >= 0):
        raise ValueError(f"delta_low and delta_high are differences of probabilities, not negative; got {delta_low} and {delta_high}")
    dropped = _dppo_dropped(logp_cur.detach(), logp_gen, adv, delta_low=delta_low, delta_high=delta_high)
    return _surrogate(logp_cur - logp_gen, adv.masked_fill(dropped, 0.0))


dppo_tv.clipped = _dppo_dropped


def gmpo(logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, mask: Tensor, *, log_clip_low: float, log_clip_high: float) -> Tensor:
    """-A exp(mean_t min(log r, log_clip_high)) where A >= 0, -A exp(mean_t max(log r, -log_clip_low)) where A < 0. [B,T] -> [B,T]

    r = pi_cur / pi_prox. GMPO, arXiv:2507.20673: the geometric mean of token ratios, each clipped by itself.
    """
    if not (log_clip_low >= 0 and log_clip_high >= 0):
        raise ValueError(f"log_clip_low and log_clip_high are distances from log r = 0; got {log_clip_low} and {log_clip_high}")
    log_ratio = _bounded(logp_cur - logp_prox, adv, -log_clip_low, log_clip_high)
    return _surrogate(_row_mean(log_ratio, mask), adv)


def _gmpo_clipped(
    logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, mask: Tensor, *, log_clip_low: float, log_clip_high: float
) -> Tensor:
    """True where a token's log-ratio was clipped. [B,T] -> [B,T]"""
    return _outside(logp_cur - logp_prox, adv, -log_clip_low, log_clip_high)


gmpo.clipped = _gmpo_clipped


def sequence_ppo(logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, mask: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """max(-R A, -clip(R, 1-eps_low, 1+eps_high) A), R = prod_t pi_cur / pi_prox of the rollout. [B,T] -> [B,T]

    The loss of RLOO with more than one update on a batch, arXiv:2402.14740.
    """
    log_ratio = _row_sum(logp_cur - logp_prox, mask).expand_as(adv)
    return _surrogate(_bounded(log_ratio, adv, *_log_bounds(eps_low, eps_high)), adv)


def _sequence_clipped(
    logp_cur: Tensor, logp_prox: Tensor, adv: Tensor, mask: Tensor, *, eps_low: float, eps_high: float
) -> Tensor:
    """True at every token whose rollout's ratio is clipped. [B,T] -> [B,T]"""
    return _outside(_row_sum(logp_cur - logp_prox, mask), adv, *_log_bounds(eps_low, eps_high))


sequence_ppo.clipped = _sequence_clipped
