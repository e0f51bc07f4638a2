"""The references of a recipe, each imported and held against the place it stands in; and pairs of settings that do not go together."""

from __future__ import annotations

import importlib.util
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch

from burnish.config import Algo, Reward, Settings
from burnish.engines.base import Abilities, EngineError, check_sampling
from burnish.ref import Ref, RefError, check_signature, parameters
from burnish.rewards.call import bind as bind_reward
from burnish.rewards.pool import reward_name
from burnish.rollout.batch import GROUP_COLUMNS, STEP_COLUMNS
from burnish.trainer.columns import COLUMNS

ROOMS = {
    "algo.advantage": "burnish.algorithms.advantages", "algo.normalize": "burnish.algorithms.advantages",
    "algo.loss": "burnish.algorithms.policy_losses", "algo.reduce": "burnish.algorithms.reduce",
    "algo.correction.fn": "burnish.algorithms.corrections", "algo.length_penalty": "burnish.algorithms.returns",
    "critic.loss": "burnish.algorithms.value_losses", "sft.loss": "burnish.algorithms.token_losses",
    "sft.reduce": "burnish.algorithms.reduce", "preference.losses": "burnish.algorithms.preference_losses",
    "reward_model.loss": "burnish.algorithms.reward_losses", "reward_model.reduce": "burnish.algorithms.reduce",
    "distill.divergence": "burnish.algorithms.divergences", "distill.reduce": "burnish.algorithms.reduce",
    "data.source": "burnish.data.answers", "engine": "burnish.engines.named",
    "env": "burnish.envs", "tasks.source": "burnish.data.sources", "monitor.sinks": "burnish.monitor.sinks",
    "rewards.normalize": "burnish.algorithms.running",
}
"""Where the short names of a setting lead."""
ENGINE_ARGS = ("policy", "tokenizer", "context_tokens")
PACKAGE = str(Path(__file__).parents[1])
DIVERGENCE_ARGS = ("logits_cur", "logits_teach", "temperature")
"""What a divergence from a teacher is called with."""


LOSS_ARGS = tuple(name for name in COLUMNS if name != "weight")
"""What a loss of a policy gradient may ask for; the correction's weight is applied to what it gives."""


def problems_of_references(s: Settings) -> Iterator[str]:
    """Problems of every reference but the sources, which are looked at where they are called, and preference losses (plan.preferences)."""
    for place, algo, rewards in algos(s):
        yield from _algo(place, algo, rewards, s)
    if s.critic is not None:
        yield from part("critic.loss", s.critic.loss, ("value_cur", "value_prox", "ret"))
        yield from _tried("critic.loss", s.critic.loss, _columns(1))
    if s.sft is not None:
        yield from part("sft.loss", s.sft.loss, ("logp_cur",), lambda call: call(logp_cur=0))
        yield from _reduce("sft.reduce", s.sft.reduce)
    if s.distill is not None:
        if s.distill.divergence is not None:
            yield from part(
                "distill.divergence", s.distill.divergence, DIVERGENCE_ARGS, lambda call: call(**dict.fromkeys(DIVERGENCE_ARGS))
            )
        yield from _reduce("distill.reduce", s.distill.reduce)
    for place, env in (("env", s.env), *((f"environments.{i}.env", e.env) for i, e in enumerate(s.environments))):
        yield from _env(place, env)
    yield from _engine(s)
    for i, sink in enumerate(s.monitor.sinks):
        yield from _sink(f"monitor.sinks.{i}", sink)
    yield from _rewards("rewards", s.rewards)
    for i, e in enumerate(s.environments):
        yield from _rewards(f"environments.{i}.rewards", e.rewards)


def algos(s: Settings) -> list[tuple[str, Algo, Sequence[Reward]]]:
    """Every policy-gradient section that is used, with its place and the rewards it learns from."""
    if s.algo is None:
        return []
    if not s.environments:
        return [("algo", s.algo, s.rewards)]
    own = [(f"environments.{i}.algo", e.algo, e.rewards) for i, e in enumerate(s.environments) if e.algo is not None]
    shared = [r for e in s.environments if e.algo is None for r in e.rewards]
    return ([("algo", s.algo, shared)] if shared else []) + own


def part(place: str, ref: Ref, provided: Sequence[str], try_call: Callable[[Callable[..., Any]], Any] | None = None) -> Iterator[str]:
    """The problem of one reference, if it has one; `try_call` says how the caller will call it."""
    try:
        fn = ref.load(room=room_of(place))
        check_signature(ref.path, fn, ref.values, provided)
    except RefError as error:
        yield f"{place}: {error}"
        return
    if try_call is None:
        by_place = [n for n, p in parameters(fn).items() if p.kind is inspect.Parameter.POSITIONAL_ONLY]
        if by_place:
            yield f"{place}: {ref.path} takes {by_place} by position only, and is called by name; remove the / from its signature"
        return
    try:
        try_call(lambda *args, **kwargs: inspect.signature(fn).bind(*args, **kwargs, **ref.values))
    except TypeError as error:
        yield f"{place}: {ref.path} is called with {', '.join(provided)}, which it does not take: {error}"


def room_of(place: str) -> str:
    """The room of the short names at a place, which may stand in one of several environments or in a list."""
    names = [name for name in place.split(".") if not name.isdecimal()]
    return ROOMS[".".join(names[1:] if names[0] == "environments" else names)]


def _rewards(place: str, rewards: Sequence[Reward]) -> Iterator[str]:
    names: dict[str, int] = {}
    for i, reward in enumerate(rewards):
        try:
            bind_reward(reward.fn)
        except RefError as error:
            yield f"{place}.{i}.fn: {error}"
        if (name := reward_name(reward)) in names:
            yield f"{place}.{i}.fn: {place}.{names[name]} is called {name} too, and scores are kept by that name; give one of them a `name`"
        names[name] = i
        if reward.normalize is not None:
            yield from _norm(f"{place}.{i}.normalize", reward.normalize)
    if rewards and all(reward.cost for reward in rewards):
        yield f"{place}: every entry is a cost, so there is no reward to learn from; add one"
    elif rewards and all(reward.weight == 0 for reward in rewards if not reward.cost):
        yield f"{place}: every weight is 0, so all rewards are equal and nothing can be learned"


def _norm(place: str, ref: Ref) -> Iterator[str]:
    problems = list(part(place, ref, ()))
    yield from problems
    if not problems:
        try:
            made = ref.bind(room=ROOMS["rewards.normalize"])()
        except ValueError as error:
            yield f"{place}: {ref.path}: {error}"
            return
        if not (callable(getattr(made, "update", None)) and callable(getattr(made, "normalize", None)) and is_dataclass(made)):
            yield f"{place}: {ref.path} is no dataclass with update(value) and normalize(value), whose fields are saved; use RunningNorm"


def _reduce(place: str, ref: Ref) -> Iterator[str]:
    yield from part(
        place, ref, ("loss", "mask", "num_tokens", "num_rollouts"), lambda call: call("loss", "mask", num_tokens=1, num_rollouts=1)
    )


def _tried(place: str, ref: Ref, known: Mapping[str, Any]) -> Iterator[str]:
    """A call on two rollouts of two tokens, which meets values that make no sense. Nothing where the signature does not fit; and a function
    of the user's is not called before the run, with numbers that are made up.
    """
    if list(part(place, ref, tuple(known))):
        return
    fn = ref.load(room=room_of(place))
    if not getattr(fn, "__module__", "").startswith("burnish."):
        return
    try:
        fn(**{name: known[name] for name in (set(parameters(fn)) - set(ref.values)) & known.keys()}, **ref.values)
    except ValueError as error:
        yield f"{place}: {ref.path}: {error}"


def _columns(num_rewards: int) -> dict[str, Any]:
    """Two rollouts of one prompt, of two tokens each."""
    token, one = torch.tensor([[-1.0, -2.0], [-2.0, -1.0]]), torch.tensor([0.0, 1.0])
    mask = torch.ones(2, 2, dtype=torch.bool)
    return dict.fromkeys((*COLUMNS, *STEP_COLUMNS, *GROUP_COLUMNS), token) | {
        "mask": mask, "step_mask": mask, "reward": one, "num_tokens": torch.tensor([2.0, 2.0]),
        "scores": one[:, None].expand(2, num_rewards), "groups": [[0, 1]], "greedy_reward": one,
        "baseline": torch.tensor(0.0), "bootstrap": one, "log_ratio": torch.zeros(2, 2),
    }


def _algo(place: str, a: Algo, rewards: Sequence[Reward], s: Settings) -> Iterator[str]:
    yield from part(f"{place}.advantage", a.advantage, (*GROUP_COLUMNS, *STEP_COLUMNS))
    yield from _advantage(place, a, rewards, s)
    if a.normalize is not None:
        yield from part(f"{place}.normalize", a.normalize, ("adv", "mask"))
    if a.length_penalty is not None:
        yield from part(f"{place}.length_penalty", a.length_penalty, ("num_tokens",))
    if a.correction is not None:
        yield from part(f"{place}.correction.fn", a.correction.fn, ("log_ratio", "mask"))
    yield from _reduce(f"{place}.reduce", a.reduce)
    known = _columns(sum(not r.cost for r in rewards))
    yield from _tried(f"{place}.advantage", a.advantage, known)
    for name, ref in (("loss", a.loss), ("normalize", a.normalize), ("length_penalty", a.length_penalty)):
        if ref is not None:
            yield from _tried(f"{place}.{name}", ref, known)
    if a.correction is not None:
        yield from _tried(f"{place}.correction.fn", a.correction.fn, known)
    problems = list(part(f"{place}.loss", a.loss, LOSS_ARGS))
    if problems:
        yield f"{problems[0]}. A loss may ask for the columns {', '.join(LOSS_ARGS)}"
        return
    names, path = set(parameters(a.loss.load(room=ROOMS["algo.loss"]))), a.loss.path
    if not {"logp_cur", "entropy"} & names:
        yield f"{place}.loss: {path} takes neither logp_cur nor entropy, so it has no gradient"
    elif "logp_gen" in names and "logp_prox" not in names and a.correction is not None:
        yield (
            f"{place}.loss: {path} takes ratios to the sampler itself (logp_gen), so {place}.correction would count the same distance "
            f"twice; set {place}.correction: null"
        )
    if "logp_ref" in names and a.kl is None:
        yield f"{place}.loss: {path} asks for logp_ref, which is there only with {place}.kl; add {place}.kl.coef=0, which only measures"
    for column, needs in (("logp_teach", s.distill), ("value_cur", s.critic), ("value_prox", s.critic), ("ret", s.critic)):
        if column in names and needs is None:
            yield f"{place}.loss: {path} asks for {column}, which is there only with {'distill' if column == 'logp_teach' else 'critic'}"
    if wrong := names & {"score_cur", "divergence"}:
        yield f"{place}.loss: {path} asks for {sorted(wrong)[0]}, which a policy gradient does not have"
    if "logp_prox" not in names and a.correction is None:
        for field in ("prox", "stop_at_kl_nats"):
            if getattr(a, field) != Algo.model_fields[field].default:
                yield f"{place}.{field} does nothing: {path} takes no ratio to logp_prox, and there is no correction; remove it"
    elif a.stop_at_kl_nats is not None and a.prox == "scored" and s.train.epochs * s.train.minibatches == 1:
        yield (
            f"{place}.stop_at_kl_nats does nothing: a step has one update, which begins where the step does; raise train.epochs or "
            "train.minibatches, or remove it"
        )


def _advantage(place: str, a: Algo, rewards: Sequence[Reward], s: Settings) -> Iterator[str]:
    try:
        fn = a.advantage.load(room=ROOMS["algo.advantage"])
        names = set(parameters(fn)) - set(a.advantage.values)
    except RefError:
        return
    path, over_batch, needs_group = a.advantage.path, getattr(fn, "over_batch", False), getattr(fn, "needs_group", False)
    if wrong := names & ({*GROUP_COLUMNS, *STEP_COLUMNS} - {*(STEP_COLUMNS if over_batch else GROUP_COLUMNS)}):
        where = "one of the whole step" if over_batch else "one of a group (mark it @over_batch for the whole step)"
        yield f"{place}.advantage: {path} is {where} and cannot have {sorted(wrong)[0]}"
    if needs_group and s.train.samples_per_prompt < 2:
        yield (
            f"train.samples_per_prompt is {s.train.samples_per_prompt}, and {place}.advantage {path} compares the samples "
            "of one prompt: every advantage would be 0. Use at least 2 samples, or an advantage without a group baseline (reward_itself)"
        )
    if a.constant_groups != "keep" and not needs_group:
        yield (
            f"{place}.constant_groups is {a.constant_groups}, and {place}.advantage {path} has no group baseline: groups of equal rewards "
            "do teach something there; use keep"
        )
    if a.constant_groups != "keep" and (s.constraint is not None or "scores" in names):
        what = f"{place}.advantage {path} compares single scores" if "scores" in names else "there is a constraint"
        yield (
            f"{place}.constant_groups is {a.constant_groups}, and {what}: samples of equal reward still differ in their "
            f"{'scores' if 'scores' in names else 'costs'}; use keep"
        )
    if "scores" in names and (normed := [i for i, r in enumerate(rewards) if r.normalize is not None]):
        yield f"rewards.{normed[0]}.normalize does nothing: {place}.advantage {path} reads scores as they were given; remove it"
    if a.constant_groups != "keep" and a.kl is not None and a.kl.place != "loss":
        yield (
            f"{place}.constant_groups is {a.constant_groups}, and {place}.kl.place is {a.kl.place}: samples of equal reward still differ "
            f"in their KL; use keep, or {place}.kl.place: loss"
        )
    if a.kl is not None and a.kl.place == "token_reward" and "token_reward" not in names:
        yield (
            f"{place}.kl.place is token_reward, and {place}.advantage {path} takes one reward a rollout; use place: reward, or an "
            "advantage of token rewards (returns_to_go, gae)"
        )
    if ("value" in names) != (s.critic is not None):
        yield f"{place}.advantage: {path} " + (
            "needs the values of a critic; add a section critic" if s.critic is None else "does not ask for the critic's values; use gae"
        )
    if "logp_teach" in names and s.distill is None:
        yield f"{place}.advantage: {path} needs teachers; add distill with teachers and divergence: null"
    if s.distill is not None and "logp_teach" not in {*names, *_loss_names(a)}:
        yield f"distill: neither {place}.advantage {path} nor {place}.loss asks for logp_teach; use advantage: teacher_gap"
    if "baseline" not in names and a.baseline_decay != Algo.model_fields["baseline_decay"].default:
        yield f"{place}.baseline_decay does nothing: {place}.advantage {path} asks for no baseline; use minus_ema, or remove it"
    costs = any(r.cost for r in rewards)
    if s.constraint is not None and (not costs or names & {"scores", "value", "step_reward", "logp_teach", "baseline", "greedy_reward"}):
        yield "constraint: " + (
            "no entry of rewards has cost: true" if not costs
            else f"{place}.advantage {path} makes no advantage of one cost a rollout; use one of reward alone (standardize, center, ...)"
        )


def _loss_names(a: Algo) -> set[str]:
    try:
        return set(parameters(a.loss.load(room=ROOMS["algo.loss"])))
    except RefError:
        return set()


def _env(place: str, ref: Ref) -> Iterator[str]:
    problems = list(part(place, ref, ()))
    yield from problems
    if not problems:
        made = ref.load(room=ROOMS["env"])
        if isinstance(made, type) and (missing := [name for name in ("start", "step") if not callable(getattr(made, name, None))]):
            yield f"{place}: {ref.path} has no {' and no '.join(missing)}; an environment is a class with start(task) and async step(text)"
        elif isinstance(made, type) and not inspect.iscoroutinefunction(made.step):
            yield f"{place}: step of {ref.path} is no coroutine; write `async def step(self, text)`"


def _sink(place: str, ref: Ref) -> Iterator[str]:
    problems = list(part(place, ref, ()))
    yield from problems
    if not problems:
        try:
            ref.bind(room=ROOMS["monitor.sinks"])()
        except Exception as error:
            yield f"{place}: {raised(ref, error)}"


def _engine(s: Settings) -> Iterator[str]:
    """Whether the engine takes its values, and its kind can do what the run asks of it."""
    problems = list(part("engine", s.engine, ENGINE_ARGS))
    yield from problems
    if problems:
        return
    make = s.engine.load(room=ROOMS["engine"])
    if (check := getattr(make, "check_values", None)) is not None:
        try:
            check(**s.engine.values)
        except EngineError as error:
            yield str(error)
    if (abilities := getattr(make, "abilities", None)) is not None:
        yield from problems_of_engine(s, abilities)


def problems_of_engine(s: Settings, abilities: Abilities) -> Iterator[str]:
    """What the run asks of the engine that it cannot do."""
    if s.algo is not None and s.samples and not abilities.logprobs:
        yield f"engine: {s.engine.path} does not tell the log-probs of what it draws, which a policy gradient needs; use native"
    if not abilities.shares_weights and not abilities.publish:
        yield f"engine: {s.engine.path} takes no new weights, so it would go on sampling from the first ones; use native"
    used = {**({"sampling": s.sampling} if s.samples else {}), **({"evaluate.sampling": s.evaluate.sampling} if s.rewards else {})}
    for place, sampling in used.items():
        try:
            check_sampling(abilities, sampling, name=s.engine.path)
        except EngineError as error:
            yield str(error).replace("sampling.", f"{place}.", 1)


def problems_of_pairs(s: Settings) -> Iterator[str]:
    """Settings that are fine alone and cannot work together."""
    if s.algo is not None and s.model.lora is not None and s.model.lora.dropout:
        yield (
            f"model.lora.dropout is {s.model.lora.dropout}, and a policy gradient compares the log-probs of sampler and trainer, which "
            "dropout would set apart; set it to 0"
        )
    if s.sft is not None and s.sft.min_reward is not None and any(r.normalize is not None for r in s.rewards):
        yield "sft.min_reward is in the unit of the rewards, which rewards' normalize takes away; remove one of the two"
    if s.loop == "sync" and s.sampling.top_k == 1:
        yield "sampling.top_k is 1, which draws the same sample each time, so nothing can be learned; use 0 (all tokens) or more"
    if s.loop != "sync" and (normed := [i for i, r in enumerate(s.rewards) if r.normalize is not None]):
        yield f"rewards.{normed[0]}.normalize is for training rollouts, which loop: {s.loop} does not have; remove it"
    places = {"rewards": s.rewards, **{f"environments.{i}.rewards": e.rewards for i, e in enumerate(s.environments)}}
    if s.constraint is None and (costs := [f"{at}.{i}" for at, rs in places.items() for i, r in enumerate(rs) if r.cost]):
        yield f"{costs[0]}.cost is true, and only a section constraint reads costs; add one, or remove it"
    if s.model.lora is not None and importlib.util.find_spec("peft") is None:
        yield "model.lora needs the library peft: pip install 'burnish[lora]'"
    if s.loop == "sync" and s.preference is not None and s.train.samples_per_prompt < 2:
        yield "train.samples_per_prompt is 1, and preference makes pairs of the samples of one prompt; use at least 2"
    if s.preference is not None and s.preference.refresh_steps and s.model.lora is not None:
        yield (
            "preference.refresh_steps moves the reference, which with model.lora is the model without its adapter; set it to 0, or train "
            "without model.lora"
        )
    if s.sft is not None and (s.loop == "sync") != (s.sft.best_of is not None):
        yield "sft.best_of is " + ("needed in loop: sync: how many samples of each group are learned" if s.loop == "sync"
                                   else "not read in loop: sft, where every answer is learned; remove it")
    if s.sft is not None and s.loop == "sync" and (s.sft.best_of or 0) > s.train.samples_per_prompt:
        yield f"sft.best_of is {s.sft.best_of}, but train.samples_per_prompt is {s.train.samples_per_prompt}"
    if s.sft is not None and s.loop != "sync" and s.sft.min_reward is not None:
        yield "sft.min_reward is not read in loop: sft; remove it"
    if s.distill is not None and s.loop == "sync" and s.distill.on_policy_frac:
        yield "distill.on_policy_frac is not read in loop: sync, where every answer is the policy's own; remove it"


def raised(ref: Ref, error: Exception) -> str:
    """What a part of the user's raised, and where. The package's own errors explain themselves."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and frames[-1].filename.startswith(PACKAGE):
        return str(error)
    own = [frame for frame in frames if not frame.filename.startswith(PACKAGE)]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{ref.path} raised {type(error).__name__}: {error}{where}"
