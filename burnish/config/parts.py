"""Sections that runs of every method share: models, sampling, where rows come from, sizes, the optimizer, taps."""

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


class Guide(Strict):
    """What a turn's text must look like: tokens that cannot lead there are never drawn. One of the three."""

    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    """Of the kind Lark reads."""

    @model_validator(mode="after")
    def _is_one(self) -> Guide:
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a guide is one of json_schema, regex and grammar; found {' and '.join(given) or 'none'}")
        return self


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
    end_tokens: tuple[str | int, ...] | None = None
    """Tokens that end a turn; none given: the tokenizer's own end token."""
    min_new_tokens: NonNegativeInt = 0
    """Before so many tokens of a turn no end token is drawn and no stop text is looked for."""
    logit_bias: dict[str | int, float] = {}
    """Added to the logits of these tokens, by name or id, before the temperature."""
    banned_tokens: tuple[str | int, ...] = ()
    """Tokens that are never drawn, by name or id."""
    repetition_penalty: PositiveFloat = 1.0
    """Logits of tokens that stand in the sequence already, prompt included, are divided by it where positive, else multiplied."""
    guide: Guide | None = None
    """What the text must look like; in evaluate.sampling and in serving."""

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

    @model_validator(mode="after")
    def _fits_its_own_length(self) -> Sampling:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens is {self.min_new_tokens}, but max_new_tokens {self.max_new_tokens}")
        if both := [token for token in self.logit_bias if token in self.banned_tokens]:
            raise ValueError(f"{both[0]!r} stands in logit_bias and in banned_tokens; remove one")
        return self

    @property
    def distribution(self) -> dict[str, float]:
        """The arguments of models.logprobs.sampling_logits. What is done to logits before it is models.logprobs.Adjustment."""
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
    """After this long the call is stopped and the rollout counts as not scored; one for many rollouts at once has it for each."""
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
    """Tokens, padding included, that go through the model at once. Changes memory and speed, never the result, except which weights
    LoRA's dropout leaves out."""
    max_skipped_updates: PositiveInt = 3
    """Stop the run after this many updates in a row with a loss or gradient that is not finite."""
    allow_in_sampling: tuple[Literal["repetition_penalty", "min_new_tokens"], ...] = ()
    """With these the policy that is trained is not the one that is used, so `sampling` may have them only where they are named here."""


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
