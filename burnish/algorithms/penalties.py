"""Distance to the reference and entropy: estimators of KL(cur || ref) from sampled tokens, their gradients, exact values over the
vocabulary, and the control of both coefficients.

No estimator is clamped: a clamp takes the gradient away where the policy has drifted furthest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def k1(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """log pi - log pi_ref, in nats; unbiased, may be negative. [B,T] -> [B,T]. Schulman 2020, "Approximating KL divergence"."""
    return logp - logp_ref


def k2(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """(log pi - log pi_ref)^2 / 2; biased as a value, as a loss its expected gradient is that of KL(cur || ref)."""
    return 0.5 * (logp - logp_ref) ** 2


def k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """exp(-k1) - 1 + k1; unbiased, never negative, less noisy than k1."""
    log_ratio = logp_ref - logp
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_loss(logp_cur: Tensor, logp_gen: Tensor, logp_ref: Tensor, *, estimator: str, gradient: str) -> Tensor:
    """The KL term per token, with the gradient that is asked for. [B,T] -> [B,T]

    naive: the estimator is differentiated (k2: gradient of KL(cur||ref); k3: of KL(ref||cur); k1: zero in expectation).
    straight_through_k2: the value of the estimator with the gradient of k2.
    importance_weighted: (pi_cur / pi_gen) k, differentiated through both (gradient of KL(cur||ref); DeepSeek-V3.2).
    """
    value = ESTIMATORS[estimator](logp_cur, logp_ref)
    if gradient == "naive":
        return value
    if gradient == "straight_through_k2":
        slope = k2(logp_cur, logp_ref)
        return value.detach() + (slope - slope.detach())
    if gradient == "importance_weighted":
        return torch.exp(logp_cur - logp_gen) * value
    raise ValueError(f"gradient is naive, straight_through_k2 or importance_weighted, not {gradient!r}")


def exact_kl(logits_cur: Tensor, logits_ref: Tensor) -> Tensor:
    """KL(cur || ref) = sum_v pi_cur (log pi_cur - log pi_ref), in nats, differentiable in both. [...,V] -> [...]

    A token left out of sampling has the logit -inf and adds nothing; inf where ref alone leaves a token out. With the arguments
    exchanged it is KL(ref || cur).
    """
    log_cur, log_ref = torch.log_softmax(logits_cur, -1), torch.log_softmax(logits_ref, -1)
    chance = log_cur.exp()
    return (chance * torch.where(chance > 0, log_cur - log_ref, 0.0)).sum(-1)


def entropy(logits: Tensor) -> Tensor:
    """-sum_v pi log pi, in nats, differentiable; of logits already divided by the temperature. [...,V] -> [...]"""
    log_prob = torch.log_softmax(logits, -1)
    chance = log_prob.exp()
    return -(chance * torch.where(chance > 0, log_prob, 0.0)).sum(-1)


@dataclass(slots=True)
class KlController:
    """The KL coefficient. With a target: coef <- coef (1 + clip(KL/target - 1, -0.2, 0.2) n / horizon).

    arXiv:1909.08593 section 2.2. KL in nats a rollout, n and horizon in rollouts. `coef` is the whole state.
    """

    coef: float
    target_nats: float | None = None
    horizon_rollouts: int = 10000

    def update(self, kl_nats: float, num_rollouts: int) -> float:
        if self.target_nats is not None:
            error = min(max(kl_nats / self.target_nats - 1, -0.2), 0.2)
            self.coef *= 1 + error * num_rollouts / self.horizon_rollouts
        return self.coef


@dataclass(slots=True)
class EntropyController:
    """The entropy coefficient. It is coef while H <= target and 0 above; coef <- coef + step where H < target, - step where H > target.

    Skywork-OR1, arXiv:2505.22312; coef stays within [0, max_coef]. H in nats a token. `coef` is the whole state.
    """

    coef: float
    target_nats: float
    step: float
    max_coef: float

    def update(self, entropy_nats: float) -> float:
        """The coefficient for updates on rollouts with this entropy; then moves coef for the next ones."""
        active = self.coef if entropy_nats <= self.target_nats else 0.0
        sign = (entropy_nats < self.target_nats) - (entropy_nats > self.target_nats)
        self.coef = min(max(self.coef + sign * self.step, 0.0), self.max_coef)
        return active
