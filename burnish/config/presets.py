"""Methods by the names of their papers, as settings: what `preset: NAME` in a recipe stands for.

A preset holds what makes the method (which functions, with which values) and how many updates its paper makes of a step, and
nothing about models, tasks or learning rates. Plain data: a reference is a mapping with `ref`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """values: settings as in a recipe. needs: dotted names of settings that depend on the task or the models, which the recipe gives."""

    about: str
    source: str
    values: Mapping[str, Any]
    needs: tuple[str, ...] = ()


def _ref(name: str, **values: Any) -> dict[str, Any]:
    return {"ref": name, **values}


def _algo(advantage: str | dict, loss: str | dict, reduce: str | dict, **others: Any) -> dict[str, Any]:
    parts = {"advantage": advantage, "loss": loss, "reduce": reduce}
    return {"algo": {name: _ref(part) if isinstance(part, str) else part for name, part in parts.items()} | others}


_CLIP = _ref("ppo_clip", eps_low=0.2, eps_high=0.2)
_GRPO = _algo("standardize", _CLIP, "rollout_mean", kl={"coef": 0.04, "place": "loss", "estimator": "k3"})
_PPO = _algo(
    _ref("gae", gamma=1.0, lam=0.95), _CLIP, "token_mean", normalize=_ref("whiten"),
    kl={"coef": 0.02, "place": "token_reward", "estimator": "k1"},
)


def _grpo_with(**correction: Any) -> dict[str, Any]:
    return {"algo": _GRPO["algo"] | {"correction": correction}}


POLICY_GRADIENTS = {
    # rewards as they are, or above a baseline; one update a step
    "reinforce": Preset(
        "The reward times the gradient of a rollout's log-prob, without a baseline.", "Williams 1992",
        _algo("reward_itself", "reinforce", "rollout_sum"),
    ),
    "reinforce_batch_mean": Preset(
        "REINFORCE above the mean reward of the step.", "Williams 1992", _algo("minus_batch_mean", "reinforce", "rollout_sum"),
    ),
    "reinforce_ema": Preset(
        "REINFORCE above a moving average of earlier steps' mean reward.", "Williams 1992",
        _algo("minus_ema", "reinforce", "rollout_sum", baseline_decay=0.9),
    ),
    "rloo": Preset(
        "REINFORCE above the mean reward of the other samples of the same prompt.", "arXiv:2402.14740",
        _algo("leave_one_out", "reinforce", "rollout_sum"),
    ),
    "sequence_ppo": Preset(
        "RLOO with several updates a step: the ratio of a whole rollout, clipped.", "arXiv:2402.14740",
        _algo("leave_one_out", _ref("sequence_ppo", eps_low=0.2, eps_high=0.2), "rollout_mean"),
    ),
    "remax": Preset(
        "REINFORCE above the reward of the most probable answer, which costs one more sample a prompt.", "arXiv:2310.10505",
        _algo("above_greedy", "reinforce", "rollout_sum"),
    ),
    "opo": Preset(
        "REINFORCE above the group's mean reward weighted by length, the baseline of least variance; one update a step.",
        "arXiv:2505.23585", _algo("length_weighted", "reinforce", "rollout_sum"),
    ),
    "gpg": Preset(
        "REINFORCE above the group's mean; groups without signal do not dilute the step.", "arXiv:2504.02546",
        _algo("rescale_by_signal", "reinforce", "token_mean"),
    ),
    # the ratio clipped a token
    "grpo": Preset(
        "Rewards standardized in their group, PPO's clip, every rollout weighs the same, a KL beside the loss.", "arXiv:2402.03300", _GRPO,
    ),
    "grpo_batch_std": Preset(
        "GRPO divided by the deviation of the whole step, token-mean, no KL (Lite PPO).", "arXiv:2508.08221",
        _algo("standardize_by_batch", _CLIP, "token_mean"),
    ),
    "dr_grpo": Preset(
        "GRPO without its two biases: not divided by the deviation, nor by a rollout's own length.", "arXiv:2503.20783",
        _algo("center", _CLIP, "rollout_sum_over"), needs=("algo.reduce.length",),
    ),
    "dapo": Preset(
        "GRPO without KL: clip-higher, refill of groups without signal, token-mean, a soft penalty of overlong answers.",
        "arXiv:2503.14476",
        _algo(
            "standardize", _ref("ppo_clip", eps_low=0.2, eps_high=0.28), "token_mean", constant_groups="refill",
            length_penalty=_ref("soft_overlong"),
        ) | {"train": {"minibatches": 16}},
        needs=("algo.length_penalty.max_tokens", "algo.length_penalty.cache_tokens"),
    ),
    "cispo": Preset(
        "The importance weight is clipped in place of the loss, so every token keeps a gradient.",
        "arXiv:2506.13585, bounds of arXiv:2510.13786",
        _algo("standardize", _ref("cispo", ratio_min=0.0, ratio_max=5.0), "token_mean") | {"train": {"minibatches": 16}},
    ),
    "sapo": Preset(
        "A smooth gate in place of the clip, steeper for negative advantages.", "arXiv:2511.20347",
        _algo("standardize", _ref("sapo", tau_pos=1.0, tau_neg=1.05), "rollout_mean"),
    ),
    "dppo": Preset(
        "A trust region in probabilities, around the sampler itself, in place of the ratio's clip.", "arXiv:2602.04879",
        _algo("center", _ref("dppo_tv", delta_low=0.2, delta_high=0.2), "token_mean", correction=None),
    ),
    "gdpo": Preset(
        "GRPO on several rewards, each standardized by itself before they are added.", "arXiv:2601.05242",
        _algo("standardize_each", _CLIP, "rollout_mean"), needs=("algo.advantage.weights",),
    ),
    # the ratio of a rollout
    "gspo": Preset(
        "The geometric mean of a rollout's ratios, clipped within the paper's 3e-4 and 4e-4; four updates a step.", "arXiv:2507.18071",
        _algo("standardize", _ref("gspo", eps_low=3e-4, eps_high=4e-4), "rollout_mean") | {"train": {"minibatches": 4}},
    ),
    "gspo_token": Preset(
        "GSPO for advantages that differ within a rollout.", "arXiv:2507.18071 section 4.3",
        _algo("standardize", _ref("gspo_token", eps_low=3e-4, eps_high=4e-4), "rollout_mean") | {"train": {"minibatches": 4}},
    ),
    "gmpo": Preset(
        "The geometric mean of token ratios, each clipped by itself, wider than PPO does.", "arXiv:2507.20673",
        _algo("standardize", _ref("gmpo", log_clip_low=0.4, log_clip_high=0.4), "rollout_mean"),
    ),
    # token rewards, and values of states
    "reinforce_pp": Preset(
        "Rewards with the KL inside, from each token on, whitened over the step; PPO's clip, no critic.", "arXiv:2501.03262",
        _algo(
            "returns_to_go", _CLIP, "token_mean", normalize=_ref("whiten"), kl={"coef": 0.01, "place": "token_reward", "estimator": "k1"},
        ),
    ),
    "reinforce_pp_baseline": Preset(
        "Rewards above their group's mean, whitened over the step; the KL is a k2 loss of its own.", "arXiv:2501.03262",
        _algo("center", _CLIP, "token_mean", normalize=_ref("whiten"), kl={"coef": 0.001, "place": "loss", "estimator": "k2"}),
    ),
    "ppo": Preset(
        "Generalised advantage estimation by a critic of its own, the clip, the KL in the rewards; eight updates a step.",
        "arXiv:1707.06347, values of arXiv:2203.02155",
        _PPO | {"critic": {"kind": "model", "loss": _ref("clipped_error", clip=0.2)}, "train": {"minibatches": 8}},
    ),
    "ppo_head": Preset(
        "PPO with the critic as a head on the policy: no second model, but one body for both.", "arXiv:1707.06347",
        _PPO | {"critic": {"kind": "head", "coef": 0.5, "loss": _ref("clipped_error", clip=0.2)}, "train": {"minibatches": 8}},
    ),
    # another sampler, or an older one
    "decoupled_ppo": Preset(
        "The clip is anchored on the policy at the step's start; how far that is from the sampler is a weight, at most 5.",
        "arXiv:2110.00641, cap of arXiv:2505.24298",
        _algo("standardize", _CLIP, "token_mean", prox="scored", correction={"fn": _ref("token_truncate", high=5.0)})
        | {"train": {"minibatches": 4}},
    ),
    "grpo_tis": Preset(
        "GRPO with each token's weight for the sampler's mismatch truncated (TIS).", "fengyao.notion.site/off-policy-rl",
        _grpo_with(fn=_ref("token_truncate", high=2.0)),
    ),
    "grpo_icepop": Preset(
        "GRPO that drops tokens on which sampler and trainer disagree too much.", "arXiv:2510.18855",
        _grpo_with(fn=_ref("token_mask", low=0.5, high=5.0)),
    ),
    "grpo_mis": Preset(
        "GRPO that drops rollouts whose whole ratio is too large (MIS).", "richardli.xyz/rl-collapse",
        _grpo_with(fn=_ref("sequence_mask", low=0.0, high=2.0)),
    ),
    "grpo_geometric_mis": Preset(
        "GRPO that drops rollouts whose mean token ratio is off, whatever their length.", "richardli.xyz/rl-collapse",
        _grpo_with(fn=_ref("geometric_mask", low=0.99, high=1.01)),
    ),
    # teachers and costs
    "opd": Preset(
        "On-policy distillation: each token's advantage is how much more probable the teachers find it.",
        "arXiv:2306.13649; as an advantage, Thinking Machines 2025",
        _algo("teacher_gap", "importance_sampling", "token_mean") | {"distill": {"divergence": None}}, needs=("distill.teachers",),
    ),
    "safe_rlhf": Preset(
        "Most reward while the mean cost stays below a limit, by a Lagrange multiplier; group baselines in place of critics.",
        "arXiv:2310.12773, multiplier of arXiv:2007.03964",
        _algo("standardize", _CLIP, "token_mean") | {"constraint": {"kp": 0.1, "ki": 0.01}}, needs=("constraint.limit",),
    ),
}

PREFERENCES: dict[str, Preset] = {}
"""Pairs of answers, or single wanted and unwanted ones."""

ANSWERS: dict[str, Preset] = {}
"""Written answers, teachers, reward models."""

PRESETS: Mapping[str, Preset] = {**POLICY_GRADIENTS, **PREFERENCES, **ANSWERS}


def preset_of(name: str) -> Preset:
    """ValueError names the nearest, and all there are."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 3, 0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"no preset is called {name!r}; {hint}There are: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
