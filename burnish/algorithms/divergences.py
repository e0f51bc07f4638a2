"""Divergences of the policy from a teacher, exact over the vocabulary: logits [...,V] -> nats [...].

Logits are finite and of both models' same vocabulary; both are divided by `temperature`, and the result is not multiplied by its square.
The teacher gets no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from burnish.algorithms.ensembles import weighted_mean


def forward_kl(logits_cur: Tensor, logits_teach: Tensor, *, temperature: float) -> Tensor:
    """KL(teach || cur) = sum_v p_teach (log p_teach - log p_cur): covers all that the teacher does. [...,V] -> [...]"""
    cur, teach = _logp(logits_cur, logits_teach, temperature)
    return _kl(teach, cur)


def reverse_kl(logits_cur: Tensor, logits_teach: Tensor, *, temperature: float) -> Tensor:
    """KL(cur || teach) = sum_v p_cur (log p_cur - log p_teach): keeps to what the teacher does. [...,V] -> [...]"""
    cur, teach = _logp(logits_cur, logits_teach, temperature)
    return _kl(cur, teach)


def generalized_jsd(logits_cur: Tensor, logits_teach: Tensor, *, beta: float, temperature: float) -> Tensor:
    """beta KL(teach || m) + (1 - beta) KL(cur || m), m = beta p_teach + (1 - beta) p_cur. [...,V] -> [...]

    GKD, arXiv:2306.13649 eq. 1. beta 0 is KL(teach || cur) and beta 1 is KL(cur || teach), as published. That is a jump: next to
    either end the divergence goes to 0, with beta (or 1 - beta) times that KL.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}; it must lie between 0 and 1")
    cur, teach = _logp(logits_cur, logits_teach, temperature)
    if beta == 0:
        return _kl(teach, cur)
    if beta == 1:
        return _kl(cur, teach)
    middle = torch.logaddexp(teach + math.log(beta), cur + math.log1p(-beta))
    return beta * _kl(teach, middle) + (1 - beta) * _kl(cur, middle)


def mixture_logprob(logp_teach: Tensor, *, weights: Sequence[float]) -> Tensor:
    """sum_k w_k log p_k / sum_k w_k, one log-prob for several teachers. [K,B,T], K weights -> [B,T]

    The advantage towards it is the weighted mean of those towards each. It is the log of a geometric mean, not of a distribution.
    """
    return weighted_mean(logp_teach, weights=weights)


def _logp(logits_cur: Tensor, logits_teach: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    return (logits_cur / temperature).log_softmax(-1), (logits_teach.detach() / temperature).log_softmax(-1)


def _kl(logp: Tensor, logp_other: Tensor) -> Tensor:
    """KL(p || other). [...,V] -> [...]"""
    return (logp.exp() * (logp - logp_other)).sum(-1)
