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
        "REINFORCE above the mean reward of the other samples of the same prompt.", "arXiv:2402.14740, without its KL in the reward",
        _algo("leave_one_out", "reinforce", "rollout_sum"),
    ),
    "sequence_ppo": Preset(
        "RLOO with several updates a step: the ratio of a whole rollout, clipped.", "arXiv:2402.14740",
        _algo("leave_one_out", _ref("sequence_ppo", eps_low=0.2, eps_high=0.2), "rollout_mean") | {"train": {"minibatches": 2}},
    ),
    "remax": Preset(
        "REINFORCE above the reward of the most probable answer, which costs one more sample a prompt.",
        "arXiv:2310.10505, without its KL in the reward",
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
    "grpo_process": Preset(
        "GRPO on the rewards of steps: a token's advantage is the sum of those of its step and all later ones.",
        "arXiv:2402.03300 section 4.1.3", {"algo": _GRPO["algo"] | {"advantage": _ref("standardize_steps")}},
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
        _algo("standardize", _ref("sapo", tau_pos=1.0, tau_neg=1.05), "rollout_mean") | {"train": {"minibatches": 4}},
    ),
    "dppo": Preset(
        "A trust region in probabilities, around the sampler itself, in place of the ratio's clip.", "arXiv:2602.04879, bounds of prime-rl",
        _algo("center", _ref("dppo_tv", delta_low=0.2, delta_high=0.2), "token_mean", correction=None) | {"train": {"minibatches": 2}},
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
        _algo("standardize", _ref("gmpo", log_clip_low=0.4, log_clip_high=0.4), "rollout_mean") | {"train": {"minibatches": 8}},
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
        "The clip is anchored on the policy at the step's start; the distance to the sampler is a weight, above 5 it drops the token.",
        "arXiv:2110.00641, cap of arXiv:2505.24298",
        _algo("standardize", _CLIP, "token_mean", prox="scored", correction={"fn": _ref("token_mask", low=0.0, high=5.0)})
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

def _preference(*losses: dict[str, Any], loop: str = "preference", **others: Any) -> dict[str, Any]:
    return {"loop": loop, "preference": {"losses": [{"fn": loss} for loss in losses], **others}}


_DPO = _ref("sigmoid", beta=0.1)

PREFERENCES: dict[str, Preset] = {
    # the logistic loss of the difference of implied rewards
    "dpo": Preset("The reward that the policy implies ranks the pairs, by a logistic loss.", "arXiv:2305.18290", _preference(_DPO)),
    "cdpo": Preset(
        "DPO for labels of which a share is wrong: the margin stops where that share says.", "Mitchell 2023",
        _preference(_ref("sigmoid", beta=0.1, label_smoothing=0.1)),
    ),
    "robust_dpo": Preset(
        "DPO for labels of which a share is wrong, unbiased by it and not bounded below.", "arXiv:2403.00409",
        _preference(_ref("robust", beta=0.1, label_smoothing=0.1)),
    ),
    "dpo_norm": Preset(
        "DPO of mean log-ratios a token, so that length does not count.", "Tulu 3, arXiv:2411.15124",
        _preference(_ref("sigmoid_norm", beta=5.0)),
    ),
    "f_dpo": Preset(
        "DPO with the Jensen-Shannon divergence in place of the KL.", "arXiv:2309.16240",
        _preference(_ref("sigmoid", beta=0.1, f_divergence="js")),
    ),
    "rpo": Preset(
        "DPO beside the likelihood of the chosen answers, a token.", "arXiv:2404.19733, on written pairs", _preference(_DPO, nll_coef=1.0),
    ),
    "ld_dpo": Preset(
        "DPO in which tokens past the shorter answer's length weigh half.", "arXiv:2409.06411", _preference(_DPO, length_alpha=0.5),
    ),
    "wpo": Preset(
        "DPO whose pairs weigh by how probable they are under the policy.", "arXiv:2406.11827",
        _preference(_ref("sigmoid", beta=0.01), weigh_by_policy=True),
    ),
    "tr_dpo": Preset(
        "DPO whose reference becomes the policy every 512 steps (the paper's hard update).", "arXiv:2404.09656",
        _preference(_DPO, refresh_steps=512, refresh_mix=1.0),
    ),
    # other losses of the same difference
    "ipo": Preset(
        "The difference aims at 1/(2 beta) nats and holds there.", "arXiv:2310.12036",
        _preference(_ref("ipo", beta=0.1, length_normalize=False)),
    ),
    "hinge": Preset(
        "The difference is pushed up to 1/beta nats, no further (RSO).", "arXiv:2309.06657", _preference(_ref("hinge", beta=0.05)),
    ),
    "exo": Preset(
        "The reverse KL to the smoothed labels.", "arXiv:2402.00856", _preference(_ref("exo_pair", beta=0.1, label_smoothing=0.001)),
    ),
    "discopop": Preset(
        "A loss found by search. It rises with the margin around 0, so it needs updates that leap over that hill.", "arXiv:2406.08414",
        _preference(_ref("discopop", beta=0.05, tau=0.05)),
    ),
    "aot": Preset(
        "The distribution of margins is to lie above the reference's: they are compared by rank.", "arXiv:2406.05882",
        _preference(_ref("aot", beta=0.1)),
    ),
    "aot_unpaired": Preset(
        "Rewards of chosen and rejected answers are compared by rank, whichever belong together.", "arXiv:2406.05882",
        _preference(_ref("aot_unpaired", beta=0.1)),
    ),
    # chosen and rejected each against a point of its own
    "nca": Preset("The chosen answer's own reward must rise too.", "arXiv:2402.05369", _preference(_ref("nca_pair", beta=0.01))),
    "bco": Preset("Chosen above and rejected below the mean reward so far.", "arXiv:2404.04656", _preference(_ref("bco_pair", beta=0.1))),
    "sppo": Preset(
        "The chosen answer's gain aims at 1/(2 beta) nats, the rejected one's at less that.", "arXiv:2405.00675",
        _preference(_ref("sppo_hard", beta=0.001)),
    ),
    "apo_zero": Preset("Chosen up, rejected down, each by itself.", "arXiv:2408.06266", _preference(_ref("apo_zero", beta=0.1))),
    "apo_down": Preset(
        "Both down, the rejected further: for a model that is better than the chosen answers.", "arXiv:2408.06266",
        _preference(_ref("apo_down", beta=0.1)),
    ),
    "kto": Preset(
        "Single answers that were wanted or not, against the mean drift from the reference.", "arXiv:2402.01306",
        _preference(_ref("kto", beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)),
    ),
    # without a reference
    "orpo": Preset(
        "The likelihood of the chosen answers, with the odds ratio of the pair beside it at a tenth.", "arXiv:2403.07691",
        {"loop": "preference", "preference": {"losses": [{"fn": _ref("orpo"), "weight": 0.1}], "nll_coef": 1.0}},
    ),
    "simpo": Preset(
        "Mean log-probs a token are the rewards, with a margin to reach.", "arXiv:2405.14734",
        _preference(_ref("simpo", beta=2.0, gamma=1.0)),
    ),
    "cpo": Preset(
        "DPO with a uniform reference, beside the likelihood of the chosen answers.", "arXiv:2401.08417",
        _preference(_ref("cpo", beta=0.1), nll_coef=1.0, nll_normalization="sequence_sum"),
    ),
    "slic": Preset(
        "The chosen answer's log-prob is to be 1 nat above the rejected one's, beside its likelihood.", "arXiv:2305.10425",
        _preference(_ref("slic", delta=1.0), nll_coef=0.5, nll_normalization="sequence_sum"),
    ),
    # pairs of the policy's own samples
    "online_dpo": Preset(
        "DPO on the best and the worst of each prompt's samples by their rewards.", "arXiv:2402.04792", _preference(_DPO, loop="sync"),
    ),
    "irpo": Preset(
        "Online DPO beside the likelihood of the best samples, from a new reference every 100 steps (iterative reasoning).",
        "arXiv:2404.19733", _preference(_DPO, loop="sync", nll_coef=1.0, refresh_steps=100),
    ),
}
"""Pairs of answers, or single wanted and unwanted ones."""

ANSWERS: dict[str, Preset] = {
    "sft": Preset(
        "Cross-entropy of written answers; every token weighs the same.", "-",
        {"loop": "sft", "sft": {"loss": _ref("cross_entropy"), "reduce": _ref("token_mean")}},
    ),
    "dft": Preset(
        "Cross-entropy weighed by each token's probability, so that tokens the policy finds unlikely pull less.", "arXiv:2508.05629",
        {"loop": "sft", "sft": {"loss": _ref("dft"), "reduce": _ref("token_mean")}},
    ),
    "rft": Preset(
        "The best of each prompt's samples is learned as if it had been written (best of n, rejection sampling).",
        "arXiv:2308.01825; the best of n: arXiv:2307.09288 section 3.2.3",
        {"loop": "sync", "sft": {"loss": _ref("cross_entropy"), "reduce": _ref("token_mean"), "best_of": 1}},
    ),
    "gkd": Preset(
        "Whole distributions of teachers, on written answers in half of the steps and on the policy's own in the others.",
        "arXiv:2306.13649",
        {
            "loop": "distill",
            "distill": {"divergence": _ref("generalized_jsd", beta=0.5), "reduce": _ref("token_mean"), "on_policy_frac": 0.5},
        },
        needs=("distill.teachers",),
    ),
}
"""Written answers, teachers, reward models."""

PRESETS: Mapping[str, Preset] = {**POLICY_GRADIENTS, **PREFERENCES, **ANSWERS}


def preset_of(name: str) -> Preset:
    """ValueError names the nearest, and all there are."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 3, 0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"no preset is called {name!r}; {hint}There are: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
