"""Rewards -> advantages.

Most compare the samples of one group, [G] -> [G]. Those marked `over_batch` get the whole step by name: [B] or [B,T];
`groups` lists the rows of each group. Rewards come as plain numbers: nothing here is differentiated.

A group whose rewards are all equal gives exactly 0: it is tested by max == min, because in float32 the mean of seven
times 0.7 is off by one ulp, and an ulp over a small eps is no longer small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from burnish.algorithms.reduce import masked


def group_baseline(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Marks an advantage that compares samples of one task: with one sample it is always 0."""
    fn.needs_group = True
    return fn


def over_batch(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Marks an advantage that takes the columns of the whole step instead of the rewards of one group."""
    fn.over_batch = True
    return fn


def _constant(reward: Tensor) -> bool:
    return reward.numel() < 2 or bool(reward.max() == reward.min())


def _by_group(reward: Tensor, groups: Sequence[Sequence[int]], fn: Callable[[Tensor], Tensor]) -> Tensor:
    out = torch.zeros_like(reward)
    for rows in groups:
        out[rows] = fn(reward[rows])
    return out


def _check_fracs(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must lie between 0 and 1")


# one number a rollout, from its group

@group_baseline
def standardize(reward: Tensor, *, eps: float = 1e-4, ddof: int = 1) -> Tensor:
    """(R - mean R) / (std R + eps). [G] -> [G]

    GRPO, arXiv:2402.03300 eq. 3. ddof 1 is the sample standard deviation that every public implementation uses.
    """
    if _constant(reward):
        return torch.zeros_like(reward)
    return (reward - reward.mean()) / (reward.std(correction=ddof) + eps)


@group_baseline
def center(reward: Tensor) -> Tensor:
    """R - mean R. [G] -> [G]. Dr. GRPO, arXiv:2503.20783."""
    if _constant(reward):
        return torch.zeros_like(reward)
    return reward - reward.mean()


@group_baseline
def leave_one_out(reward: Tensor) -> Tensor:
    """R_i - mean of the others = G/(G-1) (R_i - mean R). [G] -> [G]. RLOO, arXiv:2402.14740."""
    if _constant(reward):
        return torch.zeros_like(reward)
    n = reward.numel()
    return (reward - reward.mean()) * (n / (n - 1))


@group_baseline
def length_weighted(reward: Tensor, num_tokens: Tensor) -> Tensor:
    """R - sum n R / sum n, n the sampled tokens of each rollout. [G], [G] -> [G]. OPO, arXiv:2505.23585."""
    if _constant(reward):
        return torch.zeros_like(reward)
    return reward - (num_tokens * reward).sum() / num_tokens.sum().clamp(min=1)


def above_greedy(reward: Tensor, greedy_reward: Tensor) -> Tensor:
    """R - R of the greedy completion of the same task. [G], [] -> [G]. ReMax, arXiv:2310.10505."""
    return reward - greedy_reward


def reward_itself(reward: Tensor) -> Tensor:
    """A = R, without a baseline. [G] -> [G]. REINFORCE (Williams 1992)."""
    return reward.clone()


# one number a rollout, from the whole step

@over_batch
@group_baseline
def standardize_by_batch(reward: Tensor, groups: Sequence[Sequence[int]], *, eps: float = 1e-4, ddof: int = 1) -> Tensor:
    """(R - mean of its group) / (std of all rewards of the step + eps). [B] -> [B]

    arXiv:2508.08221: the deviation of one small group is noisy, and tiny where nearly all samples agree.
    """
    if _constant(reward):
        return torch.zeros_like(reward)
    return _by_group(reward, groups, center) / (reward.std(correction=ddof) + eps)


def signal_scale(reward: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """alpha = B / (B - M), M the rollouts of groups whose rewards are all equal. [B] -> []. GPG, arXiv:2504.02546."""
    flat = sum(len(rows) for rows in groups if _constant(reward[rows]))
    total = sum(len(rows) for rows in groups)
    return reward.new_tensor(total / max(total - flat, 1))


@over_batch
@group_baseline
def rescale_by_signal(reward: Tensor, groups: Sequence[Sequence[int]], *, f_norm: float = 1.0) -> Tensor:
    """alpha (R - mean of its group) / f_norm, alpha = B / (B - M). [B] -> [B]. GPG, arXiv:2504.02546.

    The M rollouts of groups without signal do not dilute the step: the others weigh as if they were all of it.
    """
    if f_norm <= 0:
        raise ValueError(f"f_norm is {f_norm}; advantages are divided by it, so it must be positive")
    return _by_group(reward, groups, center) * (signal_scale(reward, groups) / f_norm)


@over_batch
@group_baseline
def standardize_each(
    scores: Tensor, groups: Sequence[Sequence[int]], *, weights: Sequence[float], eps: float = 1e-4, ddof: int = 1
) -> Tensor:
    """sum_k w_k standardize(score k in its group), then standardize over the step. [B,K] -> [B]. GDPO, arXiv:2601.05242.

    Standardizing the sum instead would let the score with the widest spread drown the others.
    """
    if len(weights) != scores.shape[1]:
        raise ValueError(f"{len(weights)} weights for {scores.shape[1]} scores; give one weight a score")
    total = torch.zeros_like(scores[:, 0])
    for score, weight in zip(scores.unbind(1), weights, strict=True):
        total = total + weight * _by_group(score, groups, lambda s: standardize(s, eps=eps, ddof=ddof))
    return standardize(total, eps=eps, ddof=ddof)


@over_batch
def minus_batch_mean(reward: Tensor) -> Tensor:
    """R - mean R of the step. [B] -> [B]. REINFORCE with a baseline (Williams 1992)."""
    return center(reward)


@over_batch
def minus_ema(reward: Tensor, baseline: Tensor) -> Tensor:
    """R - b, b a moving average of the mean reward of earlier steps (returns.EmaBaseline). [B], [] -> [B]. Williams 1992."""
    return reward - baseline


# one number a token

@over_batch
def returns_to_go(token_reward: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + gamma G of the next valid token; masked tokens are skipped, neither discounted nor counted. [B,T] -> [B,T]

    REINFORCE (Williams 1992); of rewards with the KL inside, before whitening: REINFORCE++, arXiv:2501.03262 eq. 9.
    """
    _check_fracs(gamma=gamma)
    reward, out = masked(token_reward, mask), torch.zeros_like(token_reward)
    total = reward.new_zeros(len(reward))
    for t in reversed(range(reward.shape[1])):
        total = torch.where(mask[:, t], reward[:, t] + gamma * total, total)
        out[:, t] = total
    return masked(out, mask)


@over_batch
def returns_minus_baseline(token_reward: Tensor, baseline: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t - b, b one number for the step [] or for each rollout [B]. [B,T] -> [B,T]. REINFORCE with a baseline (Williams 1992)."""
    return masked(returns_to_go(token_reward, mask, gamma=gamma) - baseline.reshape(-1, 1), mask)


@over_batch
def returns_minus_batch_mean(token_reward: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t - mean total reward of the rollouts that have a valid token. [B,T] -> [B,T]. REINFORCE with a baseline (Williams 1992)."""
    mean = masked(token_reward, mask).sum() / mask.any(1).sum().clamp(min=1)
    return returns_minus_baseline(token_reward, mean, mask, gamma=gamma)


@over_batch
def returns_above_greedy(token_reward: Tensor, greedy_reward: Tensor, mask: Tensor) -> Tensor:
    """G_t - R of the greedy completion. [B,T], [B] -> [B,T]. ReMax with a KL in the rewards, arXiv:2310.10505."""
    return returns_minus_baseline(token_reward, greedy_reward, mask)


@over_batch
def gae(token_reward: Tensor, value: Tensor, mask: Tensor, bootstrap: Tensor, *, gamma: float, lam: float) -> Tensor:
    """A_t = d_t + gamma lam A_next, d_t = r_t + gamma V_next - V_t, over valid tokens only. [B,T] -> [B,T]

    "next" is the next valid token, so what an environment wrote costs no discount and lends no value. After the last
    one V_next = bootstrap [B]: 0 for an episode that ended, the critic's value for one that was cut off.
    GAE, arXiv:1506.02438 eq. 16.
    """
    _check_fracs(gamma=gamma, lam=lam)
    reward, value, out = masked(token_reward, mask), masked(value, mask), torch.zeros_like(token_reward)
    adv, value_next = torch.zeros_like(bootstrap), bootstrap
    for t in reversed(range(reward.shape[1])):
        delta = reward[:, t] + gamma * value_next - value[:, t]
        adv = torch.where(mask[:, t], delta + gamma * lam * adv, adv)
        value_next = torch.where(mask[:, t], value[:, t], value_next)
        out[:, t] = adv
    return masked(out, mask)


def value_targets(adv: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """What the critic is fitted to: A + V, with A as gae gave it, before any whitening. [B,T] -> [B,T]. arXiv:1506.02438."""
    return masked(adv + value, mask)


def standardize_steps(step_reward: Tensor, step_mask: Tensor, mask: Tensor, *, eps: float = 1e-4, ddof: int = 1) -> Tensor:
    """A_t = sum of the standardized rewards of the steps that end at t or later. [G,T] -> [G,T]

    step_mask is True on the last token of a step, where its reward stands; the mean and the deviation are those of all
    steps of the group. GRPO with process supervision, arXiv:2402.03300 section 4.1.3.
    """
    step = torch.zeros_like(step_reward).masked_scatter(step_mask, standardize(step_reward[step_mask], eps=eps, ddof=ddof))
    return masked(step.flip(1).cumsum(1).flip(1), mask)


@over_batch
def teacher_gap(logp_teach: Tensor, logp_gen: Tensor, mask: Tensor) -> Tensor:
    """log pi_teach - log pi_gen. [B,T] -> [B,T]

    Where gen = cur, the loss -A log pi_cur has the gradient of KL(cur || teach) of the next token. On-policy distillation:
    arXiv:2306.13649; as an advantage, Thinking Machines 2025, "On-policy distillation".
    """
    return masked(logp_teach - logp_gen, mask)


def whiten(adv: Tensor, mask: Tensor, *, eps: float = 1e-8, ddof: int = 1, shift_mean: bool = True) -> Tensor:
    """(A - mean) / sqrt(var + eps) over the valid tokens of the whole step; without shift_mean the mean is added back. [B,T] -> [B,T]

    REINFORCE++, arXiv:2501.03262 eq. 10. The variance is that of the centred values: E[A^2] - E[A]^2 loses all digits
    in float32 where the mean is large.
    """
    valid = adv[mask]
    mean = valid.mean()
    scaled = torch.zeros_like(valid)
    if not _constant(valid):
        centred = valid - mean
        scaled = centred / (centred.square().sum() / (len(valid) - ddof) + eps).sqrt()
    return torch.zeros_like(adv).masked_scatter(mask, scaled if shift_mean else scaled + mean)
