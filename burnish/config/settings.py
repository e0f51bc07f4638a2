"""The tree of settings, and what of it goes together. A test changes each field and looks for the effect."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, ValidationInfo, model_validator

from burnish.config.methods import Algo, Constraint, Critic, Distill, Preference, RewardModel, Sft
from burnish.config.parts import (
    Checkpoint,
    Data,
    Evaluate,
    Model,
    Monitor,
    Optim,
    RefField,
    Reward,
    Sampling,
    Seed,
    Strict,
    Tasks,
    Train,
)
from burnish.ref import Ref

METHODS = ("algo", "sft", "preference", "reward_model", "distill")
"""The sections of which a run has one, or two where one serves the other."""
IN_SYNC = ("algo", "sft", "preference", "distill")
"""Those that learn from rollouts; each of the other loops has the section of its own name."""


class Environment(Strict):
    """One of several environments of a run: its own tasks, rewards and algorithm."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    tasks: Tasks
    env: RefField = Ref("single_turn")
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)]
    algo: Algo | None = None
    """None: the run's."""
    prompts_per_step: PositiveInt


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
    engine: RefField = Ref("native")
    """What draws the answers. Short names: burnish.engines.named."""
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
        if self.samples:
            _only_what_is_used(self)
        elif self.train.allow_in_sampling:
            raise ValueError("train.allow_in_sampling does nothing where training draws no answers; remove it")
        if self.loop == "sync":
            if self.sampling.temperature == 0:
                raise ValueError("sampling.temperature 0 draws the same sample each time, so nothing can be learned; use 1.0")
        units, what = _units(self)
        if self.train.minibatches > units:
            raise ValueError(f"train.minibatches is {self.train.minibatches}, but a step has only {units} {what}")
        for place, rewards in (("rewards", self.rewards), *((f"environments {e.name}", e.rewards) for e in self.environments)):
            names = [reward.name or reward.fn.path for reward in rewards]
            if len(set(names)) != len(names):
                raise ValueError(f"the same reward stands twice in {place}: {names}; give one of them a name")
        return self


def _only_what_is_used(s: Settings) -> None:
    """What shapes the samples of training and is not there when the policy is used."""
    allowed = s.train.allow_in_sampling
    for name in ("repetition_penalty", "min_new_tokens"):
        is_set = getattr(s.sampling, name) != Sampling.model_fields[name].default
        if is_set and name not in allowed:
            raise ValueError(f"sampling.{name} trains another policy than the one that is used without it; to train so all the same, "
                             f"write train.allow_in_sampling: [{name}]")
        if name in allowed and not is_set:
            raise ValueError(f"train.allow_in_sampling names {name}, which sampling does not set; remove it")
    if s.sampling.guide is not None:
        raise ValueError("sampling.guide leaves tokens out that the trainer cannot know of, so log-probs would be wrong; use it in "
                         "evaluate.sampling and in serving, and in training a reward for the format")


def _units(s: Settings) -> tuple[int, str]:
    """The most that a step can be split into, and what those are."""
    if s.loop != "sync":
        return s.train.examples_per_step, "examples"
    if s.preference is not None:
        return s.train.prompts_per_step, "pairs, one a prompt"
    if s.sft is not None and s.sft.best_of is not None:
        return s.train.prompts_per_step * s.sft.best_of, "answers that are learned"
    return s.train.prompts_per_step * s.train.samples_per_prompt, "rollouts"


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
            **({} if s.samples else {"engine": s.engine})}
    sections = {"evaluate": Evaluate}
    for name, value in idle.items():
        section, _, field = name.rpartition(".")
        if value != sections.get(section, Settings).model_fields[field].default:
            raise ValueError(f"{name} does nothing in loop: {s.loop} without tasks and rewards to evaluate on; remove it, or add them")
