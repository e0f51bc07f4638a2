"""Preference losses: log-probs of whole answers in, one number per pair out. The loss of a step is the sum over its pairs / num_pairs.

Columns a loss may name, all [P]: cur_chosen, cur_rejected (differentiable), ref_chosen, ref_rejected: sums over the trained tokens of an
answer; tokens_chosen, tokens_rejected: how many there are. One that names no ref_* needs no reference model. A mixture is a weighted sum.

In the equations c = cur_chosen - ref_chosen, r = cur_rejected - ref_rejected, s = label_smoothing, n_w and n_l the token counts.
A function marked `coupled` compares answers of different pairs: it needs all pairs of the step at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def coupled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Marks a function whose value for one pair depends on the other pairs of the step."""
    fn.coupled = True
    return fn


def running_delta(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Marks a function whose `delta`, where it is not given, is the mean reward of all pairs so far (`RunningReward`)."""
    fn.running_delta = True
    return fn


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")


def _logistic(margin: Tensor, label_smoothing: float) -> Tensor:
    if not 0 <= label_smoothing <= 0.5:
        raise ValueError(f"label_smoothing is the share of swapped labels, from 0 to 0.5, got {label_smoothing}")
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def _per_token(value: Tensor, tokens: Tensor) -> Tensor:
    return value / tokens.clamp(min=1)


def _expm1(x: Tensor) -> Tensor:
    """e^x - 1; above half the dtype's range of exponents its tangent, so that value and gradient stay finite."""
    bend = math.log(torch.finfo(x.dtype).max) / 2
    return torch.expm1(x.clamp(max=bend)) + math.exp(bend) * (x - bend).clamp(min=0)


def _divergence_slope(log_ratio: Tensor, *, f_divergence: str, alpha: float | None = None) -> Tensor:
    """u(x) of `sigmoid`, up to a constant. [P] -> [P]"""
    if (f_divergence == "alpha") != (alpha is not None):
        raise ValueError(f"alpha belongs to f_divergence 'alpha' and is needed there; got f_divergence {f_divergence!r} and alpha {alpha}")
    if f_divergence == "reverse_kl" or alpha == 1:
        return log_ratio
    if f_divergence == "forward_kl":
        return -_expm1(-log_ratio)
    if f_divergence == "js":
        return logsigmoid(log_ratio)
    if f_divergence == "alpha":
        return _expm1((alpha - 1) * log_ratio) / (alpha - 1)
    raise ValueError(f"f_divergence is reverse_kl, forward_kl, js or alpha, got {f_divergence!r}")


def sigmoid(
    cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *,
    beta: float, label_smoothing: float = 0.0, f_divergence: str = "reverse_kl", alpha: float | None = None,
) -> Tensor:
    """-(1-s) log sigma(m) - s log sigma(-m), m = beta (u(c) - u(r)). [P] -> [P]

    DPO, arXiv:2305.18290 eq. 7, with u(x) = x; cDPO (Mitchell 2023) with s > 0; f-DPO, arXiv:2309.16240, with u = f'(e^x):
    reverse_kl x; forward_kl 1 - e^-x; js log sigma(x); alpha (e^((alpha-1) x) - 1) / (alpha-1), forward_kl at 0, reverse_kl at 1.
    """
    _positive(beta=beta)
    chosen = _divergence_slope(cur_chosen - ref_chosen, f_divergence=f_divergence, alpha=alpha)
    rejected = _divergence_slope(cur_rejected - ref_rejected, f_divergence=f_divergence, alpha=alpha)
    return _logistic(beta * (chosen - rejected), label_smoothing)


def sigmoid_norm(
    cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, tokens_chosen: Tensor, tokens_rejected: Tensor, *,
    beta: float, label_smoothing: float = 0.0,
) -> Tensor:
    """`sigmoid` of mean log-ratios, m = beta (c/n_w - r/n_l). [P] -> [P]. Length-normalised DPO, Tulu 3, arXiv:2411.15124."""
    _positive(beta=beta)
    margin = _per_token(cur_chosen - ref_chosen, tokens_chosen) - _per_token(cur_rejected - ref_rejected, tokens_rejected)
    return _logistic(beta * margin, label_smoothing)


def robust(
    cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float, label_smoothing: float
) -> Tensor:
    """[-(1-s) log sigma(m) + s log sigma(-m)] / (1-2s), m = beta (c - r): unbiased if a share s of labels is swapped. [P] -> [P]

    Robust DPO, arXiv:2403.00409. Not bounded below for s > 0.
    """
    _positive(beta=beta)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be at least 0 and below 0.5, got {label_smoothing}")
    margin = beta * (cur_chosen - ref_chosen - cur_rejected + ref_rejected)
    return (-(1 - label_smoothing) * logsigmoid(margin) + label_smoothing * logsigmoid(-margin)) / (1 - 2 * label_smoothing)


def hinge(cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float) -> Tensor:
    """max(0, 1 - beta (c - r)). [P] -> [P]. RSO's hinge-norm, arXiv:2309.06657."""
    _positive(beta=beta)
    return (1 - beta * (cur_chosen - ref_chosen - cur_rejected + ref_rejected)).clamp(min=0)


def slic(cur_chosen: Tensor, cur_rejected: Tensor, *, delta: float) -> Tensor:
    """max(0, delta - log pi_w + log pi_l), without a reference. [P] -> [P]

    The calibration term of SLiC-HF, arXiv:2305.10425; its regulariser is `nll` (sequence_sum) in a mixture.
    """
    return (delta - cur_chosen + cur_rejected).clamp(min=0)


def ipo(
    cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, tokens_chosen: Tensor, tokens_rejected: Tensor, *,
    beta: float, length_normalize: bool,
) -> Tensor:
    """(h - 1/(2 beta))^2, h = c - r, or c/n_w - r/n_l with length_normalize. [P] -> [P]

    IPO, arXiv:2310.12036 eq. 17, which sums. TRL and LLaMA-Factory normalise: their beta is not the paper's.
    """
    _positive(beta=beta)
    chosen, rejected = cur_chosen - ref_chosen, cur_rejected - ref_rejected
    if length_normalize:
        chosen, rejected = _per_token(chosen, tokens_chosen), _per_token(rejected, tokens_rejected)
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def exo_pair(
    cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float, label_smoothing: float
) -> Tensor:
    """KL(p || q) of p = (sigma(m), sigma(-m)), q = (1-s, s), m = beta (c - r). [P] -> [P]. EXO, arXiv:2402.00856 eq. 16."""
    _positive(beta=beta)
    if not 0 < label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be above 0, as KL to a sure label is infinite, and below 0.5, got {label_smoothing}")
    margin = beta * (cur_chosen - ref_chosen - cur_rejected + ref_rejected)
    chosen = torch.sigmoid(margin) * (logsigmoid(margin) - math.log1p(-label_smoothing))
    return chosen + torch.sigmoid(-margin) * (logsigmoid(-margin) - math.log(label_smoothing))


def nca_pair(cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float) -> Tensor:
    """-log sigma(beta c) - (log sigma(-beta c) + log sigma(-beta r)) / 2. [P] -> [P]. NCA, arXiv:2402.05369."""
    _positive(beta=beta)
    chosen, rejected = beta * (cur_chosen - ref_chosen), beta * (cur_rejected - ref_rejected)
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


@running_delta
def bco_pair(
    cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float, delta: float | Tensor
) -> Tensor:
    """-log sigma(beta c - delta) - log sigma(-(beta r - delta)), delta the running mean reward (`RunningReward`). [P] -> [P]

    BCO, arXiv:2404.04656.
    """
    _positive(beta=beta)
    return -logsigmoid(beta * (cur_chosen - ref_chosen) - delta) - logsigmoid(delta - beta * (cur_rejected - ref_rejected))


def sppo_hard(cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float) -> Tensor:
    """(c - 1/(2 beta))^2 + (r + 1/(2 beta))^2. [P] -> [P]. SPPO with win rates 1 and 0, arXiv:2405.00675."""
    _positive(beta=beta)
    return (cur_chosen - ref_chosen - 1 / (2 * beta)) ** 2 + (cur_rejected - ref_rejected + 1 / (2 * beta)) ** 2


@coupled
def aot(
    cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """`sigmoid` of m_k = beta (k-th smallest cur_chosen - cur_rejected, less k-th smallest ref_chosen - ref_rejected). [P] -> [P], by rank

    AOT, paired, arXiv:2406.05882.
    """
    _positive(beta=beta)
    margin = (cur_chosen - cur_rejected).sort().values - (ref_chosen - ref_rejected).sort().values
    return _logistic(beta * margin, label_smoothing)


@coupled
def aot_unpaired(
    cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """`sigmoid` of m_k = beta (k-th smallest c - k-th smallest r). [P] -> [P], by rank. AOT, unpaired, arXiv:2406.05882."""
    _positive(beta=beta)
    margin = (cur_chosen - ref_chosen).sort().values - (cur_rejected - ref_rejected).sort().values
    return _logistic(beta * margin, label_smoothing)


def apo_zero(cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float) -> Tensor:
    """1 - sigma(beta c) + sigma(beta r): chosen up, rejected down. [P] -> [P]. APO-zero, arXiv:2408.06266 eq. 7."""
    _positive(beta=beta)
    return torch.sigmoid(-beta * (cur_chosen - ref_chosen)) + torch.sigmoid(beta * (cur_rejected - ref_rejected))


def apo_down(cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float) -> Tensor:
    """sigma(beta c) + 1 - sigma(beta (c - r)): both down, rejected further. [P] -> [P]. APO-down, arXiv:2408.06266 eq. 8."""
    _positive(beta=beta)
    chosen, rejected = cur_chosen - ref_chosen, cur_rejected - ref_rejected
    return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))


def discopop(cur_chosen: Tensor, cur_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float, tau: float) -> Tensor:
    """-(1-g) log sigma(m) + g e^-m, g = sigma(m / tau), m = beta (c - r). [P] -> [P]

    DiscoPOP (log-ratio modulated loss), arXiv:2406.08414, with tau 0.05. Not monotone: around m = 0 it rises with m.
    """
    _positive(beta=beta, tau=tau)
    margin = beta * (cur_chosen - ref_chosen - cur_rejected + ref_rejected)
    return -torch.sigmoid(-margin / tau) * logsigmoid(margin) + torch.exp(logsigmoid(margin / tau) - margin)


def cpo(cur_chosen: Tensor, cur_rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """`sigmoid` with a uniform reference, m = beta (log pi_w - log pi_l). [P] -> [P]

    Reference-free DPO; the preference term of CPO, arXiv:2401.08417, whose other term is `nll` in a mixture.
    """
    _positive(beta=beta)
    return _logistic(beta * (cur_chosen - cur_rejected), label_smoothing)


def simpo(
    cur_chosen: Tensor, cur_rejected: Tensor, tokens_chosen: Tensor, tokens_rejected: Tensor, *,
    beta: float, gamma: float, label_smoothing: float = 0.0,
) -> Tensor:
    """`sigmoid` of m = beta (log pi_w / n_w - log pi_l / n_l) - gamma, without a reference. [P] -> [P]. SimPO, arXiv:2405.14734 eq. 6."""
    _positive(beta=beta)
    margin = _per_token(cur_chosen, tokens_chosen) - _per_token(cur_rejected, tokens_rejected)
    return _logistic(beta * margin - gamma, label_smoothing)


def _log_odds(logp: Tensor) -> Tensor:
    return logp - torch.log(torch.finfo(logp.dtype).eps - torch.expm1(logp))   # eps: p = 1 within rounding has finite odds


def orpo(cur_chosen: Tensor, cur_rejected: Tensor, tokens_chosen: Tensor, tokens_rejected: Tensor) -> Tensor:
    """-log sigma(log odds_w - log odds_l), odds = p / (1-p), log p = log pi / n, without a reference. [P] -> [P]

    The odds-ratio term of ORPO, arXiv:2403.07691 eq. 7; its lambda is the term's weight in a mixture with `nll`.
    """
    return -logsigmoid(_log_odds(_per_token(cur_chosen, tokens_chosen)) - _log_odds(_per_token(cur_rejected, tokens_rejected)))


def nll(
    cur_chosen: Tensor, tokens_chosen: Tensor, *,
    normalization: Literal["example_mean", "token_mean", "sequence_sum"], num_pairs: int, num_tokens: int,
) -> Tensor:
    """-k log pi_w, each pair's share of the cross-entropy of the chosen answers; a term of a mixture. [P] -> [P]

    k = 1/n_w: example_mean (IRPO, arXiv:2404.19733). 1: sequence_sum (CPO, SLiC-HF). num_pairs/num_tokens: token_mean.
    num_pairs counts the pairs of the whole step, num_tokens the tokens of all their chosen answers, so a split changes nothing.
    """
    if normalization == "example_mean":
        return -_per_token(cur_chosen, tokens_chosen)
    if normalization == "token_mean":
        return -cur_chosen * (num_pairs / max(num_tokens, 1))
    if normalization == "sequence_sum":
        return -cur_chosen
    raise ValueError(f"normalization is example_mean, token_mean or sequence_sum, got {normalization!r}")


def kto(
    cur: Tensor, ref: Tensor, desirable: Tensor, kl: Tensor, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    """w_D sigma(-beta (h - kl)) where desirable, else w_U sigma(beta (h - kl)), h = cur - ref: answers without a partner. [B] -> [B]

    KTO, arXiv:2402.01306 eq. 7-8; kl is `kto_baseline` of the step, [].
    """
    _positive(beta=beta)
    gain = beta * (cur - ref - kl.detach())
    return torch.where(desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))


@coupled
@torch.no_grad()
def kto_baseline(cur_mismatched: Tensor, ref_mismatched: Tensor) -> Tensor:
    """max(0, mean (cur - ref)) of answers put after other tasks' prompts, without a gradient. [B] -> []. z0 of KTO, arXiv:2402.01306."""
    return ((cur_mismatched - ref_mismatched).sum() / max(len(cur_mismatched), 1)).clamp(min=0)
