"""The section of each method, with what stands beside it: how rows become a loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from burnish.config.parts import BelowOne, Frac, Model, RefField, Strict
from burnish.ref import Ref


class Kl(Strict):
    """Distance to the reference, the policy as it was at the start of training."""

    coef: NonNegativeFloat
    """0 only measures."""
    place: Literal["reward", "token_reward", "loss"] = "loss"
    """reward: its sum is taken off a rollout's reward before any baseline; token_reward: each token's off the reward of that token."""
    estimator: Literal["k1", "k2", "k3", "exact"] = "k3"
    """exact is over the whole vocabulary at each token, not only the token that was sampled; with place: loss."""
    gradient: Literal["naive", "straight_through_k2", "importance_weighted"] = "naive"
    """Used where place is loss."""
    target_nats: PositiveFloat | None = None
    """Adapt the coefficient towards this KL of one rollout (arXiv:1909.08593); none: a fixed coefficient."""
    horizon_rollouts: PositiveInt = 10000
    """How many rollouts a full adaptation takes; used with target_nats."""

    @model_validator(mode="after")
    def _has_a_gradient(self) -> Kl:
        if self.place == "loss" and self.estimator == "k1" and self.gradient == "naive":
            raise ValueError(
                "k1 as a loss with the naive gradient does nothing: its expected gradient is zero. Use estimator: k2, "
                "gradient: importance_weighted, or place: reward"
            )
        if self.place == "loss" and self.estimator == "k2" and self.gradient == "importance_weighted":
            raise ValueError("k2 with an importance-weighted gradient is biased; use gradient: naive")
        if self.place != "loss" and self.gradient != "naive":
            raise ValueError("gradient belongs to place: loss; a KL in the reward has no gradient of its own")
        if self.estimator == "exact" and (self.place != "loss" or self.gradient != "naive"):
            raise ValueError("estimator: exact is a loss with its own gradient; use place: loss and gradient: naive")
        if self.target_nats is not None and self.coef == 0:
            raise ValueError("target_nats adapts coef by a factor, which cannot leave 0; give a positive coef to start from")
        if self.target_nats is None and self.horizon_rollouts != type(self).model_fields["horizon_rollouts"].default:
            raise ValueError("horizon_rollouts does nothing without target_nats; give both or neither")
        return self


class Correction(Strict):
    """Weights on the policy loss for the distance between the sampler and the policy at the start of a step's updates."""

    fn: RefField = Ref("token_truncate", {"high": 2.0})
    """Log-ratios to weights. Rounding alone leaves tokens' ratios below 1.6 (bench/LOG.md). Short names: burnish.algorithms.corrections."""
    normalize: bool = False
    """Weights have mean 1 over the step; this needs a pass over all rollouts before the first update."""
    denominator: Literal["original", "kept"] = "original"
    """kept: tokens that the correction drops do not count in the reduction; this needs that pass too."""


class Entropy(Strict):
    """A bonus for being undecided: -coef times the entropy, reduced as the loss is."""

    coef: NonNegativeFloat
    """With target_nats what it starts from."""
    target_nats: PositiveFloat | None = None
    """Adapt the coefficient: it rises by delta in a step whose entropy is below this, falls by delta above, and is 0 meanwhile."""
    delta: PositiveFloat = 0.001
    """By how much the coefficient moves in a step; used with target_nats."""
    max_coef: PositiveFloat = 0.05
    """Where it stops; used with target_nats."""

    @model_validator(mode="after")
    def _does_something(self) -> Entropy:
        adaptive = [n for n in ("delta", "max_coef") if getattr(self, n) != type(self).model_fields[n].default]
        if self.target_nats is None and adaptive:
            raise ValueError(f"{adaptive[0]} does nothing without target_nats; give target_nats, or remove it")
        if self.target_nats is None and self.coef == 0:
            raise ValueError("coef 0 without target_nats does nothing; remove the section, or give one of the two")
        return self


class Algo(Strict):
    """A policy-gradient method."""

    advantage: RefField = Ref("standardize")
    """Rewards to advantages, of a group or of the whole step. Short names: burnish.algorithms.advantages."""
    normalize: RefField | None = None
    """What is done to the advantages of all tokens of a step, as whiten. Short names: burnish.algorithms.advantages."""
    loss: RefField = Ref("ppo_clip", {"eps_low": 0.2, "eps_high": 0.2})
    """One number per token. Short names: burnish.algorithms.policy_losses."""
    reduce: RefField = Ref("token_mean")
    """Per-token losses to the loss of the step. Short names: burnish.algorithms.reduce."""
    correction: Correction | None = Correction()
    """None: the policy at the start of the updates is taken to be the sampler."""
    prox: Literal["scored", "gen", "interpolated"] = "scored"
    """What ratios are taken to: the policy at the start of the updates, the sampler itself, or a point between by their versions."""
    kl: Kl | None = None
    entropy: Entropy | None = None
    constant_groups: Literal["keep", "drop", "refill"] = "keep"
    """Groups whose rewards are all equal teach nothing: keep them in the counts, drop them before the update, or also draw more tasks
    until prompts_per_step groups are left (DAPO's dynamic sampling)."""
    refill_rounds: PositiveInt = 3
    """With refill: how many more rounds of tasks at most."""
    truncated: Literal["keep", "drop"] = "keep"
    """Rollouts that were cut off: drop leaves them out of the loss, after the advantages were made (DAPO's overlong filtering)."""
    length_penalty: RefField | None = None
    """Added to the reward by length, after constant groups were dropped by the reward alone. Short names: burnish.algorithms.returns."""
    baseline_decay: BelowOne = 0.9
    """Of the moving average of the mean reward, for an advantage that asks for `baseline` (minus_ema)."""
    stop_at_kl_nats: PositiveFloat | None = None
    """Leave out the rest of a step's updates once the policy is this far, a token, from where the step began. Of several environments'
    the smallest holds for all, which train one policy."""

    @model_validator(mode="after")
    def _fits_together(self) -> Algo:
        if self.prox == "gen" and self.correction is not None:
            raise ValueError(
                "prox: gen takes ratios to the sampler itself, which leaves nothing to correct; set correction: null, or prox: scored"
            )
        if self.prox == "interpolated" and self.correction is not None and (
            self.correction.normalize or self.correction.denominator == "kept"
        ):
            raise ValueError(
                "prox: interpolated saves the pass that correction.normalize and correction.denominator: kept need; use prox: scored"
            )
        if self.constant_groups != "refill" and self.refill_rounds != type(self).model_fields["refill_rounds"].default:
            raise ValueError("refill_rounds does nothing without constant_groups: refill; give both or neither")
        return self


class Critic(Strict):
    """Values of states, for advantages by generalised advantage estimation."""

    kind: Literal["model", "head"] = "model"
    """A model of its own that starts from the policy's weights, or a head on the policy."""
    model: Model | None = None
    """With kind: model, another model to start from; none: the policy's."""
    lr: PositiveFloat = 1e-5
    """With kind: model. Its schedule, betas and clip are those of optim."""
    coef: PositiveFloat = 0.5
    """With kind: head, the weight of the value loss beside the policy's."""
    loss: RefField = Ref("clipped_error", {"clip": 0.2})
    """One number per token. Short names: burnish.algorithms.value_losses."""
    warmup_steps: NonNegativeInt = 0
    """Steps at first in which only the critic learns."""
    bootstrap: bool = False
    """Where a rollout was cut off, the critic's value of the rest is part of its return. For rewards of steps that came on the way; where
    a cut-off rollout has its whole reward already this counts it twice, and where most are cut off values rise without end."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Critic:
        other = {"model": ["coef"], "head": ["lr", "model"]}[self.kind]
        if given := [n for n in other if getattr(self, n) != type(self).model_fields[n].default]:
            raise ValueError(f"{given[0]} does nothing with kind: {self.kind}; remove it, or use the other kind")
        return self


class Constraint(Strict):
    """Keep the mean cost of a step at or below `limit` by a multiplier that a PID controller moves (arXiv:2007.03964)."""

    limit: float
    """What the mean cost of a step may be."""
    kp: NonNegativeFloat = 0.1
    """Multiplier per unit of cost above the limit."""
    ki: NonNegativeFloat = 0.01
    """Multiplier per unit of cost above the limit and step, added up."""
    kd: NonNegativeFloat = 0.0
    """Multiplier per unit that the cost rose since the step before."""
    max_multiplier: PositiveFloat = 100.0
    """Bound of the multiplier, and of its added-up part."""


class Sft(Strict):
    """Learn the answers themselves, token by token."""

    loss: RefField = Ref("cross_entropy")
    """One number per token. Short names: burnish.algorithms.token_losses."""
    reduce: RefField = Ref("token_mean")
    """Per-token losses to the loss of the step. Short names: burnish.algorithms.reduce."""
    best_of: PositiveInt | None = None
    """In loop sync: of each group's samples learn this many of the highest reward (rejection-sampling fine-tuning)."""
    min_reward: float | None = None
    """In loop sync: and only those whose reward is at least this."""


class Term(Strict):
    """One loss of a mixture."""

    fn: RefField
    """One number per pair or answer. Short names: burnish.algorithms.preference_losses."""
    weight: PositiveFloat = 1.0
    """What it is multiplied by in the sum."""


class Preference(Strict):
    """Learn from pairs of answers (or from single wanted and unwanted ones, with kto)."""

    losses: Annotated[tuple[Term, ...], Field(min_length=1)] = (Term(fn=Ref("sigmoid", {"beta": 0.1})),)
    """Short names: burnish.algorithms.preference_losses."""
    nll_coef: NonNegativeFloat = 0.0
    """Weight of the chosen answer's negative log-likelihood beside the losses."""
    nll_normalization: Literal["example_mean", "token_mean", "sequence_sum"] = "example_mean"
    """Each answer's is divided by its own tokens, by the mean number of tokens of the step's chosen answers, or not at all."""
    length_alpha: Frac | None = None
    """LD-DPO (arXiv:2409.06411): weight of the tokens of the longer answer beyond the length of the shorter; none: 1."""
    weigh_by_policy: bool = False
    """WPO (arXiv:2406.11827): pairs weigh by how probable they are under the policy."""
    reference: Literal["start", "none"] = "start"
    """The policy at the start of training, or none: the losses' reference log-probs are then 0."""
    refresh_steps: NonNegativeInt = 0
    """TR-DPO (arXiv:2404.09656): every so many steps the reference moves towards the policy; 0: never."""
    refresh_mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How far it moves; 1: all the way."""

    @model_validator(mode="after")
    def _does_something(self) -> Preference:
        if self.reference == "none" and self.refresh_steps:
            raise ValueError("refresh_steps moves the reference, and reference: none has none; use reference: start, or remove it")
        if not self.refresh_steps and self.refresh_mix != type(self).model_fields["refresh_mix"].default:
            raise ValueError("refresh_mix does nothing without refresh_steps; give both or neither")
        if not self.nll_coef and self.nll_normalization != type(self).model_fields["nll_normalization"].default:
            raise ValueError("nll_normalization does nothing without nll_coef; give both or neither")
        return self


class RewardModel(Strict):
    """Learn to score answers: which of a pair is better, how one was rated, or which of its steps are right."""

    loss: RefField = Ref("bradley_terry")
    """One number per pair, answer or step; what it asks for says which. Short names: burnish.algorithms.reward_losses."""
    center_coef: NonNegativeFloat = 0.0
    """Weight of the square of the sum of both scores, which keeps them around 0; for pairs."""
    outputs: PositiveInt = 1
    """Numbers that the head gives: 1, or one an objective for several ratings, or one a class for steps."""
    classes: Annotated[int, Field(ge=2)] | None = None
    """For ordered classes (ordinal), rated 0 to classes - 1."""
    reduce: RefField = Ref("token_mean")
    """For steps: token_mean weighs all steps alike, rollout_mean all answers. Short names: burnish.algorithms.reduce."""


class Teacher(Strict):
    model: Model
    weight: PositiveFloat = 1.0
    """Of several teachers' log-probs, which are averaged."""

    @model_validator(mode="after")
    def _is_frozen(self) -> Teacher:
        if self.model.lora is not None:
            raise ValueError("model.lora does nothing in a teacher, which is not trained; remove it")
        return self


class Distill(Strict):
    """Learn the distributions of one or several teachers, token by token."""

    teachers: Annotated[tuple[Teacher, ...], Field(min_length=1)]
    """Frozen models with the policy's tokens."""
    divergence: RefField | None = Ref("generalized_jsd", {"beta": 0.5})
    """Of whole distributions. Short names: burnish.algorithms.divergences. None: the teachers are there for the algorithm's
    advantage (teacher_gap), by the log-probs of sampled tokens."""
    temperature: PositiveFloat = 1.0
    """Divides the logits of both before they are compared; used with divergence."""
    reduce: RefField = Ref("token_mean")
    """Per-token divergences to the loss of the step. Short names: burnish.algorithms.reduce."""
    on_policy_frac: Frac = 0.0
    """In loop distill: the share of steps whose answers the policy samples itself from the prompts (GKD's lambda)."""

    @model_validator(mode="after")
    def _fits_together(self) -> Distill:
        idle = [n for n in ("temperature", "reduce") if getattr(self, n) != type(self).model_fields[n].default]
        if self.divergence is None and idle:
            raise ValueError(f"{idle[0]} does nothing with divergence: null, where the algorithm's own loss is trained; remove it")
        if len(self.teachers) == 1 and self.teachers[0].weight != 1:
            raise ValueError("the weight of a single teacher does nothing; remove it, or name several teachers")
        return self
