"""Weights for rollouts that another policy sampled than the one the loss is anchored on: mismatch of sampler and trainer, staleness.

A correction maps log_ratio = logp_prox - logp_gen and mask, both [B,T], to (weight, kept), both [B,T]; rho = e^log_ratio.
Weights are constants (no gradient) and multiply the policy loss only, not the KL. They are 0 where not kept or masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.policy_losses import sequence_ratio
from burnish.algorithms.reduce import masked

Weights = tuple[Tensor, Tensor]


def _check(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ValueError(f"low and high are ratios with 0 <= low < high; got {low} and {high}")


def _product(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """prod_t rho over the tokens of a row, at every token. [B,T] -> [B,T]"""
    return torch.exp(masked(log_ratio, mask).sum(-1, keepdim=True)).expand_as(log_ratio)


def _clip(ratio: Tensor, mask: Tensor, low: float, high: float) -> Weights:
    _check(low, high)
    return masked(ratio.clamp(low, high), mask), mask


def _keep(weight: Tensor, mask: Tensor, judged: Tensor, low: float, high: float) -> Weights:
    _check(low, high)
    kept = mask & (judged >= low) & (judged <= high)
    return masked(weight, kept), kept


@torch.no_grad()
def token_truncate(log_ratio: Tensor, mask: Tensor, *, high: float, low: float = 0.0) -> Weights:
    """clip(rho, low, high); every token is kept. [B,T] -> [B,T], [B,T]

    TIS, truncated importance sampling (fengyao.notion.site/off-policy-rl), which has no lower bound. With high = inf
    it is the weight of decoupled PPO, arXiv:2110.00641.
    """
    return _clip(torch.exp(log_ratio), mask, low, high)


@torch.no_grad()
def token_mask(log_ratio: Tensor, mask: Tensor, *, low: float, high: float) -> Weights:
    """rho where low <= rho <= high, else the token is dropped. [B,T] -> [B,T], [B,T]

    IcePop, arXiv:2510.18855; INTELLECT-3, arXiv:2512.16144; token-level MIS, masked importance sampling (richardli.xyz/rl-collapse).
    """
    rho = torch.exp(log_ratio)
    return _keep(rho, mask, rho, low, high)


@torch.no_grad()
def sequence_truncate(log_ratio: Tensor, mask: Tensor, *, high: float, low: float = 0.0) -> Weights:
    """clip(prod_t rho, low, high) at every token of the rollout; every token is kept. [B,T] -> [B,T], [B,T]

    TIS with the rollout's whole ratio (richardli.xyz/rl-collapse).
    """
    return _clip(_product(log_ratio, mask), mask, low, high)


@torch.no_grad()
def sequence_mask(log_ratio: Tensor, mask: Tensor, *, low: float, high: float) -> Weights:
    """prod_t rho at every token where low <= prod_t rho <= high, else the rollout is dropped. [B,T] -> [B,T], [B,T]

    MIS, masked importance sampling with the rollout's whole ratio (richardli.xyz/rl-collapse).
    """
    ratio = _product(log_ratio, mask)
    return _keep(ratio, mask, ratio, low, high)


@torch.no_grad()
def geometric_mask(log_ratio: Tensor, mask: Tensor, *, low: float, high: float, token_cap: float | None = None) -> Weights:
    """min(rho, token_cap) where low <= (prod_t rho)^(1/n) <= high, else the rollout is dropped. [B,T] -> [B,T], [B,T]

    n is the rollout's number of tokens: unlike sequence_mask the bounds mean the same for short and long rollouts
    (richardli.xyz/rl-collapse, geometric MIS).
    """
    if token_cap is not None and not token_cap > 0:
        raise ValueError(f"token_cap is a ratio above 0, not {token_cap}")
    rho = torch.exp(log_ratio)
    weight = rho if token_cap is None else rho.clamp(max=token_cap)
    return _keep(weight, mask, sequence_ratio(log_ratio, mask)[:, None], low, high)


def weight_sums(weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sum w, sum w^2 and the number of valid tokens, which add up over micro-batches. [B,T] -> [], [], []"""
    weight = masked(weight, mask)
    return weight.sum(), (weight * weight).sum(), mask.sum()


def normalize(weight: Tensor, *, weight_sum: float, num_tokens: int) -> Tensor:
    """w / (mean of w over all valid tokens of the step), dropped ones included. [B,T] -> [B,T]

    Self-normalised importance sampling. The sums are those of the whole step (weight_sums), so that a split changes nothing.
    """
    return weight * (num_tokens / weight_sum) if weight_sum > 0 else weight


def effective_sample_frac(*, weight_sum: float, square_sum: float, num_tokens: int) -> float:
    """(sum w)^2 / (n sum w^2): the share of tokens that would weigh as much if all weighed the same; 0 where all were dropped.

    Kong 1992; the sums are pooled over micro-batches (weight_sums).
    """
    return weight_sum**2 / (num_tokens * square_sum) if square_sum > 0 else 0.0


@torch.no_grad()
def interpolated_prox(
    logp_cur: Tensor, logp_gen: Tensor, version: Tensor, mask: Tensor, *, version_cur: int, version_prox: int | None = None
) -> tuple[Tensor, Tensor]:
    """logp_prox without a pass of its own, and the alpha of the interpolation. [B,T] -> [B,T], [B,T]

    logp_gen + alpha (logp_cur - logp_gen), alpha = (v_prox - v) / (v_cur - v), 0 where v >= v_prox: v is the version that wrote the
    token, v_cur the one that gives logp_cur, v_prox the one at the start of the step's updates. None: v_cur - 1, as where versions
    count steps. The log-linear approximation of AReaL (arXiv:2505.24298; areal/trainer/ppo/actor.py). Constants, 0 where masked.
    """
    prox = version_cur - 1 if version_prox is None else version_prox
    age, part = (version_cur - version).clamp(min=1), (prox - version).clamp(min=0)
    alpha = masked(part.to(logp_gen.dtype) / age, mask)
    return masked(torch.lerp(logp_gen, logp_cur, alpha), mask), alpha
