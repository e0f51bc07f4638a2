"""The tree of settings. Every field is read somewhere, and a test changes each one and looks for the effect."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    model_validator,
)

from burnish.ref import Ref

RefField = Annotated[InstanceOf[Ref], BeforeValidator(Ref.parse), PlainSerializer(lambda ref: ref.dump())]
Frac = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Sampling(Strict):
    """How tokens are drawn, for training and, separately, for evaluation. Nothing is taken from the model's folder."""

    temperature: NonNegativeFloat = 1.0
    """0 takes the most probable token."""
    top_k: NonNegativeInt = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens whose mass reaches p."""
    min_p: Frac = 0.0
    """Keep tokens at least this fraction as probable as the most probable one."""
    max_new_tokens: PositiveInt = 128
    """Most tokens the policy may write in one turn."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn; the tokens that complete one are kept and trained."""
    end_tokens: tuple[str, ...] | None = None
    """Tokens that end a turn; none given: the tokenizer's own end token."""

    @model_validator(mode="after")
    def _stops_are_texts(self) -> Sampling:
        if any(not s for s in self.stop):
            raise ValueError("an empty stop string would end every turn at once; remove it")
        return self

    @model_validator(mode="after")
    def _greedy_needs_no_filter(self) -> Sampling:
        filters = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) != type(self).model_fields[name].default]
        if self.temperature == 0 and filters:
            why = f"temperature 0 takes the most probable token, so {filters[0]} changes nothing"
            raise ValueError(f"{why}; remove it, or give a temperature")
        return self

    @property
    def distribution(self) -> dict[str, float]:
        """What shapes the distribution that a token is drawn from, by the names of models.logprobs."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}


class EvalSampling(Sampling):
    """As sampling, but the most probable token is taken unless a temperature is given."""

    temperature: NonNegativeFloat = 0.0


class Scratch(Strict):
    """A transformer with random weights and a tokenizer of single characters, for tests and tasks that need no pretraining."""

    alphabet: str
    """Each character is one token."""
    model_type: str = "llama"
    """Any causal architecture of transformers."""
    config: dict[str, Any] = {}
    """Values for that architecture's configuration, as hidden_size: 64."""


class Lora(Strict):
    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    dropout: Frac = 0.0
    targets: str | tuple[str, ...] = "all-linear"


class Model(Strict):
    """Exactly one of `path` and `scratch`."""

    path: str | None = None
    """A folder, a hub name, a GGUF file; package:NAME for the GGUF file of an installed Python package, package:NAME/FOLDER for a folder in
    one."""
    scratch: Scratch | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in. Trained weights and Adam's state are float32 always."""
    lora: Lora | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give exactly one of model.path (a folder, hub name, GGUF file or package:NAME) and model.scratch")
        return self


class Tasks(Strict):
    source: RefField
    """A function that returns a list of Task. Short names: burnish.data.sources."""
    held_out: NonNegativeInt = 0
    """How many tasks are kept for evaluation and never trained on. Equal prompts never stand on both sides."""
    shuffle: bool = True
    """A new order each epoch, drawn from the seed."""


class Reward(Strict):
    fn: RefField
    """A function of (rollout, task), or a class of such. Short names: burnish.rewards."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")] | None = None
    """Scores are kept by it; none: the function's. Two entries of one function need it."""
    weight: float = 1.0
    cost: bool = False
    """What it gives is a cost, kept under constraint.limit, and no part of the reward."""
    timeout_s: PositiveFloat = 10.0
    """After this long the call is stopped and the rollout counts as not scored."""
    isolate: bool = True
    """Run in a worker process, which can be stopped when it hangs; False: in the trainer's own process."""
    normalize: RefField | None = None
    """Running statistics that normalise the scores of training rollouts, as {ref: RunningNorm, eps: 1e-8, ddof: 1}; those of held-out
    ones stay as they are. Short names: burnish.algorithms.running."""

    @model_validator(mode="after")
    def _keeps_its_unit(self) -> Reward:
        if self.cost and self.normalize is not None:
            raise ValueError("a cost is compared with constraint.limit and so keeps its unit; remove normalize")
        return self


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
    """Log-ratios to weights. Short names: burnish.algorithms.corrections."""
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


class Environment(Strict):
    """One of several environments of a run: its own tasks, rewards and algorithm."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    tasks: Tasks
    env: RefField = Ref("single_turn")
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)]
    algo: Algo | None = None
    """None: the run's."""
    prompts_per_step: PositiveInt


class Data(Strict):
    """Written answers to learn from."""

    source: RefField
    """A function that returns a list of Example (sft, distill), Pair (preference, reward_model) or Rated (preference by KTO, reward_model).
    Short names: burnish.data.answers."""
    held_out: NonNegativeInt = 0
    """How many are kept for evaluation and never trained on. Equal prompts never stand on both sides."""
    shuffle: bool = True
    """A new order each pass, drawn from the seed."""
    max_tokens: PositiveInt | None = None
    """Longest sequence, prompt and answer; none: the model's context. Longer ones are left out and counted."""


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


class Train(Strict):
    steps: PositiveInt
    """Rounds of the loop."""
    prompts_per_step: PositiveInt | None = None
    """In loop sync; of all environments together where there are several."""
    samples_per_prompt: PositiveInt | None = None
    """In loop sync."""
    examples_per_step: PositiveInt | None = None
    """In the loops on written answers: examples or pairs."""
    epochs: PositiveInt = 1
    """Passes over the rows of one step."""
    minibatches: PositiveInt = 1
    """Optimizer steps in one pass."""
    tokens_per_micro_batch: PositiveInt = 4096
    """Tokens, padding included, that go through the model at once. Changes memory and speed, never the result."""
    max_skipped_updates: PositiveInt = 3
    """Stop the run after this many updates in a row with a loss or gradient that is not finite."""
    slots: PositiveInt = 64
    """Sequences that the native engine decodes side by side."""


class Optim(Strict):
    lr: NonNegativeFloat = 1e-5
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat = 1.0
    warmup_updates: NonNegativeInt = 0
    schedule: Literal["cosine", "linear", "constant"] = "constant"
    final_lr_frac: Frac = 0.0
    """What is left of lr after the last update, for cosine and linear."""

    @model_validator(mode="after")
    def _has_an_end(self) -> Optim:
        if self.schedule == "constant" and self.final_lr_frac > 0:
            raise ValueError("final_lr_frac does nothing with schedule: constant; use cosine or linear, or remove it")
        return self


class Evaluate(Strict):
    every_steps: NonNegativeInt = 0
    """0: only before and after training."""
    samples_per_task: PositiveInt = 1
    sampling: EvalSampling = EvalSampling()
    success_reward: float = 1.0
    """A sample counts as correct when its reward is at least this."""


class Checkpoint(Strict):
    every_steps: PositiveInt = 10
    keep: PositiveInt = 2
    """How many of the newest stay on disk."""


class Monitor(Strict):
    sinks: tuple[RefField, ...] = (Ref("tensorboard"),)
    """Where metrics go besides metrics.jsonl. Short names: burnish.monitor.sinks."""


METHODS = ("algo", "sft", "preference", "reward_model", "distill")
"""The sections of which a run has one, or two where one serves the other."""
IN_SYNC = ("algo", "sft", "preference", "distill")
"""Those that learn from rollouts; each of the other loops has the section of its own name."""


class Settings(Strict):
    """One run."""

    name: str
    about: str = ""
    expect: str = ""
    """What the recipe is expected to reach, and how long it takes."""
    preset: str | None = None
    """A method by its paper's name (`burnish presets` lists them); what the recipe itself says comes first."""
    loop: Literal["sync", "sft", "preference", "reward_model", "distill"] = "sync"
    """Where the rows come from: the policy's own rollouts (sync), or written answers."""
    seed: Seed = 0
    model: Model
    tasks: Tasks | None = None
    env: RefField = Ref("single_turn")
    """A class with start and step. Short names: burnish.envs."""
    rewards: tuple[Reward, ...] = ()
    environments: tuple[Environment, ...] = ()
    """In place of tasks, env and rewards: several, each with its own."""
    data: Data | None = None
    sampling: Sampling = Sampling()
    algo: Algo | None = None
    """In loop sync, none and no other method: the defaults of this section."""
    critic: Critic | None = None
    constraint: Constraint | None = None
    sft: Sft | None = None
    preference: Preference | None = None
    reward_model: RewardModel | None = None
    distill: Distill | None = None
    train: Train
    optim: Optim = Optim()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    monitor: Monitor = Monitor()

    @property
    def samples(self) -> bool:
        """Whether training draws answers from the policy, by `sampling`."""
        return self.loop == "sync" or (self.distill is not None and self.distill.on_policy_frac > 0)

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Settings:
        if self.preset is not None and not (info.context or {}).get("preset"):
            raise ValueError("preset is a name for values that load_recipe fills in; here leave it out and give the values")
        if (own := _missing_method(self)) is not None:      # it stands in what is printed and saved, with its defaults
            object.__setattr__(self, *own)
        _one_method(self)
        _sources(self)
        if self.loop == "sync":
            if self.sampling.temperature == 0:
                raise ValueError("sampling.temperature 0 draws the same sample each time, so nothing can be learned; use 1.0")
            units = self.train.prompts_per_step * self.train.samples_per_prompt
        else:
            units = self.train.examples_per_step
        if self.train.minibatches > units:
            what = "rollouts" if self.loop == "sync" else "examples"
            raise ValueError(f"train.minibatches is {self.train.minibatches}, but a step has only {units} {what}")
        for place, rewards in (("rewards", self.rewards), *((f"environments {e.name}", e.rewards) for e in self.environments)):
            names = [reward.name or reward.fn.path for reward in rewards]
            if len(set(names)) != len(names):
                raise ValueError(f"the same reward stands twice in {place}: {names}; give one of them a name")
        return self


def _missing_method(s: Settings) -> tuple[str, Strict] | None:
    """The section that the loop cannot do without and that was not given."""
    given = [name for name in METHODS if getattr(s, name) is not None]
    if s.loop == "sync":
        return ("algo", Algo()) if not given or (given == ["distill"] and s.distill.divergence is None) else None
    own = {"sft": Sft, "preference": Preference, "reward_model": RewardModel}.get(s.loop)
    return (s.loop, own()) if own is not None and not given else None


def _one_method(s: Settings) -> None:
    given = [name for name in METHODS if getattr(s, name) is not None]
    allowed = IN_SYNC if s.loop == "sync" else (s.loop,)
    always = {"distill"} if s.loop == "sync" and s.algo is not None and s.distill is not None and s.distill.divergence is None else set()
    if wrong := [name for name in given if name not in allowed]:
        raise ValueError(f"the section {wrong[0]} is not read in loop: {s.loop}; remove it, or use the loop that reads it")
    if len(set(given) - always) > 1:
        teach = {"algo", "distill"} == set(given)
        hint = ", or give the teachers to the algorithm's advantage by distill.divergence: null" if teach else ""
        raise ValueError(f"the sections {' and '.join(given)} are methods of their own; keep one of them{hint}")
    if not given:
        raise ValueError(f"loop: {s.loop} needs the section {s.loop}")
    for name in ("critic", "constraint"):
        if getattr(s, name) is not None and s.algo is None:
            raise ValueError(f"{name} belongs to a policy-gradient method (the section algo)")
    if s.distill is not None and s.distill.divergence is None and s.loop != "sync":
        raise ValueError("distill.divergence null leaves the teachers to the algorithm's advantage, which is in loop: sync only")


def _sources(s: Settings) -> None:
    if s.loop == "sync":
        if s.data is not None or s.train.examples_per_step is not None:
            what = "data" if s.data is not None else "train.examples_per_step"
            meant = next((name for name in METHODS[1:] if getattr(s, name) is not None), "sft, preference, reward_model or distill")
            raise ValueError(f"{what} is not read in loop: sync; remove it, or set loop: {meant}")
        if s.environments:
            if s.tasks is not None or s.rewards or s.env != Ref("single_turn"):
                raise ValueError("environments stand in place of tasks, env and rewards; remove one or the other")
            if s.train.prompts_per_step is None:
                raise ValueError("train.prompts_per_step is needed: the sum of the environments' prompts_per_step")
            if (total := sum(e.prompts_per_step for e in s.environments)) != s.train.prompts_per_step:
                raise ValueError(f"train.prompts_per_step is {s.train.prompts_per_step}, but the environments' add up to {total}")
            names = [e.name for e in s.environments]
            if len(set(names)) != len(names):
                raise ValueError(f"two environments have the same name: {names}")
            if s.algo is None:
                raise ValueError("environments are for policy-gradient methods (the section algo)")
            if s.constraint is not None:
                raise ValueError("constraint keeps one mean cost, of the rewards of a run without environments; remove one of the two")
            if s.algo != Algo() and all(e.algo is not None for e in s.environments):
                raise ValueError("algo is read by no environment, since each has its own; remove it")
        elif s.tasks is None or not s.rewards:
            raise ValueError("loop: sync needs tasks and at least one entry of rewards")
        for name in ("prompts_per_step", "samples_per_prompt"):
            if getattr(s.train, name) is None:
                raise ValueError(f"train.{name} is needed in loop: sync")
        return
    if s.data is None or s.train.examples_per_step is None:
        raise ValueError(f"loop: {s.loop} needs {'data' if s.data is None else 'train.examples_per_step'}")
    for name in ("prompts_per_step", "samples_per_prompt"):
        if getattr(s.train, name) is not None:
            raise ValueError(f"train.{name} is not read in loop: {s.loop}, where train.examples_per_step says how much a step takes")
    if s.environments:
        raise ValueError(f"environments are not read in loop: {s.loop}; remove them")
    if (s.tasks is None) != (not s.rewards):
        raise ValueError("tasks and rewards are for evaluation here; give both or neither")
    if s.tasks is not None and (s.loop == "reward_model" or s.tasks.held_out == 0):
        raise ValueError(f"tasks in loop: {s.loop} are for evaluation only; " + (
            "a reward model does not answer, remove them" if s.loop == "reward_model" else "set tasks.held_out to how many to evaluate on"))
    if s.sampling != Sampling() and not s.samples:
        raise ValueError(f"sampling is not read in loop: {s.loop}; evaluate.sampling is what held-out answers are drawn with")
    if s.tasks is None:
        _no_tasks(s)


def _no_tasks(s: Settings) -> None:
    """What only the answers to held-out tasks read."""
    idle = {"env": s.env, "evaluate.samples_per_task": s.evaluate.samples_per_task, "evaluate.success_reward": s.evaluate.success_reward,
            **({} if s.samples else {"train.slots": s.train.slots})}
    sections = {"evaluate": Evaluate, "train": Train}
    for name, value in idle.items():
        section, _, field = name.rpartition(".")
        if value != sections.get(section, Settings).model_fields[field].default:
            raise ValueError(f"{name} does nothing in loop: {s.loop} without tasks and rewards to evaluate on; remove it, or add them")
