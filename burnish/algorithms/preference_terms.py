"""What stands around a preference loss: sums of token log-probs, weights and rewards of pairs, pairs from rewards, a moving reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.algorithms.reduce import masked


def sequence_logprob(logp: Tensor, mask: Tensor) -> Tensor:
    """sum_t log pi over trained tokens. [B,T] -> [B]"""
    return masked(logp, mask).sum(-1)


def length_desensitized(logp: Tensor, mask: Tensor, mask_other: Tensor, *, alpha: float) -> Tensor:
    """sum_t w_t log pi, w_t = 1 for the first n trained tokens and alpha after, n of the shorter answer of the pair. [P,T] -> [P]

    mask_other [P,T'] is the mask of the pair's other answer; alpha 1 is `sequence_logprob`. LD-DPO, arXiv:2409.06411.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is the weight of the tokens past the shorter answer, from 0 to 1, got {alpha}")
    shared = mask.cumsum(-1) <= mask_other.sum(-1, keepdim=True)
    return (masked(logp, mask) * torch.where(shared, 1.0, alpha)).sum(-1)


@torch.no_grad()
def likelihood_weight(
    cur_chosen: Tensor, cur_rejected: Tensor, expected_chosen: Tensor, expected_rejected: Tensor, tokens_chosen: Tensor,
    tokens_rejected: Tensor,
) -> Tensor:
    """exp((log pi_w - log e_w) / n_w + (log pi_l - log e_l) / n_l), no gradient: how likely the policy writes the pair. [P] -> [P]

    e is the product over the tokens of the probability that a token drawn there has on average, sum_v pi(v)^2, so that an answer
    of the policy's own has a weight around 1. WPO, arXiv:2406.11827 eq. 2 with sampled alignment.
    """
    chosen = (cur_chosen - expected_chosen) / tokens_chosen.clamp(min=1)
    return torch.exp(chosen + (cur_rejected - expected_rejected) / tokens_rejected.clamp(min=1))


@torch.no_grad()
def rewards_of(cur: Tensor, ref: Tensor, *, beta: float) -> Tensor:
    """beta (log pi - log pi_ref), the reward that a policy implies, without a gradient. [B] -> [B]. DPO, arXiv:2305.18290 eq. 5."""
    return beta * (cur - ref)


@dataclass(slots=True)
class RunningReward:
    """Mean over all pairs so far of the implied rewards of chosen and rejected answers, the delta of `bco_pair`. BCO, arXiv:2404.04656.

    The two fields are the whole state.
    """

    mean: float = 0.0
    num_pairs: int = 0

    def update(self, reward_chosen: Tensor, reward_rejected: Tensor) -> float:
        """Counts in the pairs of one step, [P] and [P]; returns the mean."""
        if len(reward_chosen) != len(reward_rejected):
            raise ValueError(f"{len(reward_chosen)} chosen and {len(reward_rejected)} rejected rewards are not pairs")
        if len(reward_chosen):
            self.num_pairs += len(reward_chosen)
            of_step = 0.5 * (reward_chosen.mean() + reward_rejected.mean()).item()
            self.mean += (of_step - self.mean) * len(reward_chosen) / self.num_pairs
        return self.mean


def best_and_worst(reward: Tensor, groups: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """(index of the highest reward, index of the lowest) of each group, in the order of groups; a group of equal rewards has no pair.

    reward [B], groups: indices into it. Of equals the first counts. Online DPO, arXiv:2402.04792; iterative RPO, arXiv:2404.19733.
    """
    value = reward.tolist()
    pairs = [(max(group, key=value.__getitem__), min(group, key=value.__getitem__)) for group in groups if len(group)]
    return [(best, worst) for best, worst in pairs if value[best] > value[worst]]


@torch.no_grad()
def mix_(ref_params: Iterable[Tensor], cur_params: Iterable[Tensor], *, alpha: float) -> None:
    """ref <- alpha cur + (1 - alpha) ref, in place, tensor by tensor. alpha 1 copies the policy. TR-DPO, arXiv:2404.09656."""
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be above 0 and at most 1, got {alpha}")
    for ref, cur in zip(ref_params, cur_params, strict=True):
        ref.lerp_(cur.to(ref), alpha)
