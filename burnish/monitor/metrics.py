"""Every metric, declared once."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal

Reduction = Literal["mean", "sum", "last", "max"]


@dataclass(frozen=True, slots=True)
class Metric:
    """`reduction` joins the values of several updates, and of several steps where a curve is thinned; a mean is one over all tokens of a
    step, however it was split.
    """

    name: str
    unit: str
    reduction: Reduction
    meaning: str


_DECLARED = (
    Metric("rollout/reward_mean", "", "mean", "Reward of the scored rollouts of a step"),
    Metric("rollout/success_frac", "frac", "mean", "Scored rollouts whose reward reached evaluate.success_reward"),
    Metric("rollout/sampled_tokens_mean", "tokens", "mean", "Tokens the policy wrote in one rollout"),
    Metric("rollout/truncated_frac", "frac", "mean", "Rollouts cut off before the policy ended them"),
    Metric("rollout/not_scored_count", "count", "sum", "Rollouts whose reward could not be computed; not trained on"),
    Metric("rollout/constant_groups_frac", "frac", "mean", "Groups whose rewards are all equal and so teach nothing"),
    Metric("rollout/dropped_rollouts_count", "count", "sum", "Rollouts left out of the update, for any reason"),
    Metric("rollout/left_out_count", "count", "sum", "Of these, cut off ones (algo.truncated: drop) or without a greedy answer's reward"),
    Metric("rollout/refill_rounds_count", "count", "sum", "Further rounds of tasks, drawn for groups that were dropped"),
    Metric("rollout/cost_mean", "", "mean", "Cost of the rollouts of a step, which the constraint keeps under its limit"),
    Metric("train/loss", "", "mean", "Loss that was minimised"),
    Metric("train/kl_cur_gen_nats", "nats", "mean", "Trainer against sampler, a token: 0 when both compute the same log-probs"),
    Metric("train/kl_cur_ref_nats", "nats", "mean", "Distance to the policy at the start, a token of training rollouts"),
    Metric("train/kl_cur_prox_nats", "nats", "max", "Distance to the policy at the start of a step, a token; the largest of its updates"),
    Metric("train/kl_coef", "", "last", "Weight of the KL to the reference"),
    Metric("train/entropy_coef", "", "last", "Weight of the entropy bonus"),
    Metric("train/entropy_nats", "nats", "mean", "How undecided the policy is about its next token"),
    Metric("train/clip_frac", "frac", "mean", "Sampled tokens whose ratio was clipped"),
    Metric("train/correction_weight_mean", "", "mean", "Weight of a token for the distance between sampler and trainer; near 1 when sound"),
    Metric("train/correction_dropped_frac", "frac", "mean", "Sampled tokens that the correction left out"),
    Metric("train/correction_ess_frac", "frac", "mean", "Effective sample size of these weights, as a share of the tokens"),
    Metric("train/value_error", "", "mean", "Squared distance of the critic's value to the return, a token"),
    Metric("train/critic_loss", "", "mean", "Loss of the critic"),
    Metric("train/critic_grad_norm", "", "max", "Gradient norm of the critic before clipping"),
    Metric("train/constraint_multiplier", "", "last", "Weight of the cost against the reward"),
    Metric("train/nll_nats", "nats", "mean", "Negative log-likelihood of the answers' tokens, a token"),
    Metric("train/divergence_nats", "nats", "mean", "Divergence from the teachers, a token"),
    Metric("train/kl_cur_teach_nats", "nats", "mean", "Distance to the teachers, a sampled token, estimated from its log-probs (k3)"),
    Metric("train/on_policy_frac", "frac", "mean", "Trained answers that the policy wrote itself"),
    Metric("train/too_long_count", "count", "sum", "Answers left out because with their prompt they exceed data.max_tokens or the context"),
    Metric("train/preference_accuracy_frac", "frac", "mean", "Pairs in order by score or implied reward; with KTO, answers on their side"),
    Metric("train/preference_margin", "", "mean", "Implied reward of the chosen answer less that of the rejected one"),
    Metric("train/reward_chosen_mean", "", "mean", "Implied reward of a chosen or wanted answer: beta log(cur / ref)"),
    Metric("train/reward_rejected_mean", "", "mean", "Implied reward of a rejected or unwanted answer"),
    Metric("train/logp_chosen_nats", "nats", "mean", "Log-prob of a whole chosen or wanted answer"),
    Metric("train/logp_rejected_nats", "nats", "mean", "Log-prob of a whole rejected or unwanted answer"),
    Metric("train/pair_weight_mean", "", "mean", "Weight of a pair by its probability under the policy (WPO)"),
    Metric("train/kto_baseline_nats", "nats", "mean", "KTO's baseline: log(cur / ref) of answers to other prompts, at least 0"),
    Metric("train/pair_reward_mean", "", "mean", "Implied reward of both answers of a pair; train/running_reward is its running mean"),
    Metric("train/running_reward", "", "last", "BCO's delta: mean implied reward of all pairs before the step"),
    Metric("train/score_chosen_mean", "", "mean", "The reward model's score of a chosen answer"),
    Metric("train/score_rejected_mean", "", "mean", "The reward model's score of a rejected answer"),
    Metric("train/score_mean", "", "mean", "The reward model's score of an answer"),
    Metric("train/rating_error_mean", "", "mean", "Distance of the score to the rating, in the unit of ratings"),
    Metric("train/label_accuracy_frac", "frac", "mean", "Answers whose class is the median of those the model thinks of"),
    Metric("train/step_accuracy_frac", "frac", "mean", "Steps whose class is the one the model finds most probable"),
    Metric("train/grad_norm", "", "max", "Gradient norm before clipping; the largest of the updates of a step"),
    Metric("train/lr", "", "last", "Learning rate of the last update of a step"),
    Metric("train/skipped_updates_count", "count", "sum", "Updates skipped because the loss or gradient was not finite"),
    Metric("train/stopped_updates_count", "count", "sum", "Updates left out because the policy was further than algo.stop_at_kl_nats"),
    Metric("train/critic_skipped_updates_count", "count", "sum", "Updates of the critic skipped because something was not finite"),
    Metric("train/tokens_count", "count", "sum", "Tokens trained on"),
    Metric("train/rollouts_count", "count", "sum", "Rollouts or written answers trained on"),
    Metric("eval/accuracy_frac", "frac", "mean", "Held-out samples that are correct"),
    Metric("eval/reward_mean", "", "mean", "Reward of held-out samples"),
    Metric("eval/sampled_tokens_mean", "tokens", "mean", "Tokens the policy wrote in one held-out sample"),
    Metric("eval/not_scored_count", "count", "sum", "Held-out samples whose reward could not be computed"),
    Metric("eval/loss", "", "mean", "Loss of held-out pairs or answers"),
    Metric("eval/preference_accuracy_frac", "frac", "mean", "Held-out: pairs in order by score or implied reward; KTO: answers"),
    Metric("eval/preference_margin", "", "mean", "Held-out: implied reward of the chosen answer less that of the rejected one"),
    Metric("eval/reward_chosen_mean", "", "mean", "Held-out: implied reward of a chosen or wanted answer: beta log(cur / ref)"),
    Metric("eval/reward_rejected_mean", "", "mean", "Held-out: implied reward of a rejected or unwanted answer"),
    Metric("eval/logp_chosen_nats", "nats", "mean", "Held-out: log-prob of a whole chosen or wanted answer"),
    Metric("eval/logp_rejected_nats", "nats", "mean", "Held-out: log-prob of a whole rejected or unwanted answer"),
    Metric("eval/pair_weight_mean", "", "mean", "Held-out: weight of a pair by its probability under the policy (WPO)"),
    Metric("eval/kto_baseline_nats", "nats", "mean", "Held-out: KTO's baseline: log(cur / ref) of answers to other prompts, at least 0"),
    Metric("eval/score_chosen_mean", "", "mean", "The reward model's score of a held-out chosen answer"),
    Metric("eval/score_rejected_mean", "", "mean", "The reward model's score of a held-out rejected answer"),
    Metric("eval/score_mean", "", "mean", "The reward model's score of a held-out answer"),
    Metric("eval/rating_error_mean", "", "mean", "Distance of the score to the rating of held-out answers, in the unit of ratings"),
    Metric("eval/label_accuracy_frac", "frac", "mean", "Held-out answers whose class is the median of those the model thinks of"),
    Metric("eval/step_accuracy_frac", "frac", "mean", "Held-out steps whose class is the one the model finds most probable"),
    Metric("eval/loss_nats", "nats", "mean", "Negative log-likelihood of held-out answers, a token"),
    Metric("eval/divergence_nats", "nats", "mean", "Divergence from the teachers on held-out answers, a token"),
    Metric("time/generate_s", "s", "sum", "Sampling the training rollouts"),
    Metric("time/reward_s", "s", "sum", "Waiting for rewards"),
    Metric("time/train_s", "s", "sum", "Log-probs, loss, backward and optimizer"),
    Metric("time/evaluate_s", "s", "sum", "Held-out evaluation, its sampling and scoring included"),
    Metric("time/checkpoint_s", "s", "sum", "Writing checkpoints"),
    Metric("time/other_s", "s", "sum", "The rest of the step"),
    Metric("time/step_s", "s", "sum", "The whole step; the sum of the other times"),
    Metric("rate/generate_tokens_per_s", "tokens/s", "mean", "Sampled tokens a second of generating"),
    Metric("rate/train_tokens_per_s", "tokens/s", "mean", "Tokens through the trainer, prompts included, a second of training"),
    Metric("memory/peak_gib", "GiB", "max", "Highest memory of the process so far, or of the accelerator"),
)

METRICS: dict[str, Metric] = {m.name: m for m in _DECLARED}

_FAMILIES = (
    Metric("rollout/score_<>_mean", "", "mean", "Score of the reward <>, before its weight"),
    Metric("rollout/reward_<>_mean", "", "mean", "Reward of the scored rollouts of the environment <>"),
    Metric("train/loss_<>", "", "mean", "The term <> of the loss, with its weight"),
    Metric("train/kl_coef_<>", "", "last", "Weight of the KL to the reference in the environment <>"),
    Metric("train/entropy_nats_<>", "nats", "mean", "How undecided the policy is about its next token in the environment <>"),
    Metric("train/entropy_coef_<>", "", "last", "Weight of the entropy bonus in the environment <>"),
)
"""One metric for each reward, environment or term of a run; its name stands in place of <>."""


def metric(name: str) -> Metric:
    """The declaration of `name`, or that of its family for it. KeyError with the nearest name."""
    if name in METRICS:
        return METRICS[name]
    for family in _FAMILIES:
        before, after = family.name.split("<>")
        if found := re.fullmatch(f"{before}(.+){after}", name):
            return replace(family, name=name, meaning=family.meaning.replace("<>", found[1]))
    near = difflib.get_close_matches(name, METRICS, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise KeyError(f"no metric is called {name!r}{hint}; metrics are declared in burnish/monitor/metrics.py")


def finite(metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """The metrics that are numbers, as plain int or float, and the names of those that are NaN or infinite."""
    values = {n: int(v) if isinstance(v, Integral) else float(v) for n, v in metrics.items()}
    return {n: v for n, v in values.items() if math.isfinite(v)}, sorted(n for n, v in values.items() if not math.isfinite(v))
