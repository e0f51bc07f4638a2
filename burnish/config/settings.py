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
    """A folder, a hub name, a GGUF file, or package:NAME for a GGUF file inside an installed Python package."""
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
    """A function of (rollout, task). Short names: burnish.rewards."""
    weight: float = 1.0
    timeout_s: PositiveFloat = 10.0
    """After this long the call is stopped and the rollout counts as not scored."""
    isolate: bool = True
    """Run in a worker process, which can be stopped when it hangs; False: in the trainer's own process."""


class Kl(Strict):
    """Distance to the reference, the policy as it was at the start of training."""

    coef: NonNegativeFloat
    """0 only measures."""
    place: Literal["reward", "loss"] = "loss"
    estimator: Literal["k1", "k2", "k3"] = "k3"
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
        if self.place == "reward" and self.gradient != "naive":
            raise ValueError("gradient belongs to place: loss; a KL in the reward has no gradient of its own")
        if self.target_nats is not None and self.coef == 0:
            raise ValueError("target_nats adapts coef by a factor, which cannot leave 0; give a positive coef to start from")
        if self.target_nats is None and self.horizon_rollouts != type(self).model_fields["horizon_rollouts"].default:
            raise ValueError("horizon_rollouts does nothing without target_nats; give both or neither")
        return self


class Algo(Strict):
    advantage: RefField = Ref("standardize")
    """Rewards of one group to advantages. Short names: burnish.algorithms.advantages."""
    loss: RefField = Ref("ppo_clip", {"eps_low": 0.2, "eps_high": 0.2})
    """One number per token. Short names: burnish.algorithms.policy_losses."""
    reduce: RefField = Ref("token_mean")
    """Per-token losses to the loss of the step. Short names: burnish.algorithms.reduce."""
    kl: Kl | None = None
    constant_groups: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all equal teach nothing: keep them in the counts, or drop them before the update."""


class Train(Strict):
    steps: PositiveInt
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt
    epochs: PositiveInt = 1
    """Passes over the rollouts of one step."""
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


class Settings(Strict):
    """One run."""

    name: str
    about: str = ""
    expect: str = ""
    """What the recipe is expected to reach, and how long it takes."""
    seed: Seed = 0
    model: Model
    tasks: Tasks
    env: RefField = Ref("single_turn")
    """A class with start and step. Short names: burnish.envs."""
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)]
    sampling: Sampling = Sampling()
    algo: Algo = Algo()
    train: Train
    optim: Optim = Optim()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    monitor: Monitor = Monitor()

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature 0 draws the same sample each time, so nothing can be learned; use 1.0")
        rollouts = self.train.prompts_per_step * self.train.samples_per_prompt
        if self.train.minibatches > rollouts:
            raise ValueError(f"train.minibatches is {self.train.minibatches}, but a step has only {rollouts} rollouts")
        names = [reward.fn.path for reward in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"the same reward stands twice in rewards: {names}")
        return self
