"""What can be known to go wrong before any weight is loaded: references, tasks, the model's facts, pairs that do not go together."""

from __future__ import annotations

import importlib.util
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.chat.template import encode_prompt, end_token_ids
from burnish.config import EvalSampling, Sampling, Settings
from burnish.config.errors import SettingsError
from burnish.data.tasks import Split, split
from burnish.models.load import Facts, ModelError, load_tokenizer
from burnish.models.load import inspect as inspect_model
from burnish.ref import Ref, RefError, check_signature, parameters
from burnish.rewards.call import bind as bind_reward
from burnish.rewards.pool import reward_name
from burnish.trainer.columns import COLUMNS

ROOMS = {
    "algo.advantage": "burnish.algorithms.advantages", "algo.loss": "burnish.algorithms.policy_losses",
    "algo.reduce": "burnish.algorithms.reduce", "env": "burnish.envs", "tasks.source": "burnish.data.sources",
    "monitor.sinks": "burnish.monitor.sinks",
}
MAX_ENCODED = 512
PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Checked:
    """What was learnt on the way. `facts` are lines for people; `tasks` are those the run would use."""

    notes: list[str]
    facts: list[str]
    tasks: Split
    model: Facts


def check(settings: Settings) -> list[str]:
    """Notes on settings that can work but may not do what was meant. SettingsError with all that cannot work."""
    return examine(settings).notes


def examine(settings: Settings) -> Checked:
    """As check, with what was learnt. Imports every part, makes the tasks, reads the model's configuration, loads no weights."""
    problems = [*_parts(settings), *_pairs(settings)]
    tasks = _attempt(problems, _tasks, settings)
    model = _attempt(problems, _model, settings)
    if tasks is not None and model is not None:
        problems += _fit(settings, tasks, model)
    if problems:
        raise SettingsError(problems)
    return Checked(list(_notes(settings, tasks)), list(_told(settings, tasks, model)), tasks, model)


class _Refused(Exception):
    """A problem that ends the look at one thing; the others go on."""


def _attempt(problems: list[str], look: Callable[[Settings], Any], settings: Settings) -> Any | None:
    try:
        return look(settings)
    except _Refused as refused:
        problems.append(str(refused))
        return None


# references

def _parts(s: Settings) -> Iterator[str]:
    """Problems of every reference but the task source, which is looked at where it is called."""
    yield from _part("algo.advantage", s.algo.advantage, ("reward",), lambda call: call("reward"))
    yield from _part(
        "algo.reduce", s.algo.reduce, ("loss", "mask", "num_tokens", "num_rollouts"),
        lambda call: call("loss", "mask", num_tokens=1, num_rollouts=1),
    )
    yield from _loss(s)
    yield from _env(s.env)
    for i, sink in enumerate(s.monitor.sinks):
        yield from _sink(f"monitor.sinks.{i}", sink)
    names: dict[str, int] = {}
    for i, reward in enumerate(s.rewards):
        try:
            bind_reward(reward.fn)
        except RefError as error:
            yield f"rewards.{i}.fn: {error}"
        if (name := reward_name(reward)) in names:
            yield f"rewards.{i}.fn: rewards.{names[name]} is called {name} too, and scores are kept by that name; rename one of them"
        names[name] = i


def _part(place: str, ref: Ref, provided: Sequence[str], try_call: Callable[[Callable[..., Any]], Any] | None = None) -> Iterator[str]:
    """The problem of one reference, if it has one; `try_call` says how the caller will call it."""
    try:
        fn = ref.load(room=ROOMS[place.rstrip(".0123456789")])
        check_signature(ref.path, fn, ref.values, provided)
    except RefError as error:
        yield f"{place}: {error}"
        return
    if try_call is None:
        return
    try:
        try_call(lambda *args, **kwargs: inspect.signature(fn).bind(*args, **kwargs, **ref.values))
    except TypeError as error:
        yield f"{place}: {ref.path} is called with {', '.join(provided)}, which it does not take: {error}"


def _loss(s: Settings) -> Iterator[str]:
    problems = list(_part("algo.loss", s.algo.loss, COLUMNS))
    if problems:
        yield f"{problems[0]}. A loss may ask for the columns {', '.join(COLUMNS)}"
        return
    names = parameters(s.algo.loss.load(room=ROOMS["algo.loss"]))
    if not {"logp_cur", "entropy"} & set(names):
        yield f"algo.loss: {s.algo.loss.path} takes neither logp_cur nor entropy, so it has no gradient"
    if "logp_ref" in names and s.algo.kl is None:
        yield f"algo.loss: {s.algo.loss.path} asks for logp_ref, which is there only with algo.kl; add algo.kl.coef=0, which only measures"


def _env(ref: Ref) -> Iterator[str]:
    problems = list(_part("env", ref, ()))
    yield from problems
    if not problems:
        made = ref.load(room=ROOMS["env"])
        if isinstance(made, type) and (missing := [name for name in ("start", "step") if not callable(getattr(made, name, None))]):
            yield f"env: {ref.path} has no {' and no '.join(missing)}; an environment is a class with start(task) and async step(text)"
        elif isinstance(made, type) and not inspect.iscoroutinefunction(made.step):
            yield f"env: step of {ref.path} is no coroutine; write `async def step(self, text)`"


def _sink(place: str, ref: Ref) -> Iterator[str]:
    problems = list(_part(place, ref, ()))
    yield from problems
    if not problems:
        try:
            ref.bind(room=ROOMS["monitor.sinks"])()
        except Exception as error:
            yield f"{place}: {_raised(ref, error)}"


def _pairs(s: Settings) -> Iterator[str]:
    """Settings that are fine alone and cannot work together."""
    try:
        needs_group = getattr(s.algo.advantage.load(room=ROOMS["algo.advantage"]), "needs_group", False)
    except RefError:
        needs_group = False
    if needs_group and s.train.samples_per_prompt < 2:
        yield (
            f"train.samples_per_prompt is {s.train.samples_per_prompt}, and algo.advantage {s.algo.advantage.path} compares the samples "
            "of one prompt: every advantage would be 0. Use at least 2 samples, or an advantage without a group baseline (reward_itself)"
        )
    if s.algo.constant_groups == "drop" and not needs_group:
        yield (
            f"algo.constant_groups is drop, and algo.advantage {s.algo.advantage.path} has no group baseline: groups of equal rewards do "
            "teach something there; use keep"
        )
    if s.algo.constant_groups == "drop" and s.algo.kl is not None and s.algo.kl.place == "reward":
        yield (
            "algo.constant_groups is drop, and algo.kl.place is reward: samples of equal reward still differ in their KL; use keep, "
            "or algo.kl.place: loss"
        )
    if s.sampling.top_k == 1:
        yield "sampling.top_k is 1, which draws the same sample each time, so nothing can be learned; use 0 (all tokens) or more"
    if all(reward.weight == 0 for reward in s.rewards):
        yield "rewards: every weight is 0, so all rewards are equal and nothing can be learned"
    if s.model.lora is not None and importlib.util.find_spec("peft") is None:
        yield "model.lora needs the library peft: pip install 'burnish[lora]'"


# tasks and model

def _tasks(s: Settings) -> Split:
    ref = s.tasks.source
    for problem in _part("tasks.source", ref, ()):
        raise _Refused(problem)
    try:
        made = ref.bind(room=ROOMS["tasks.source"])()
    except Exception as error:
        raise _Refused(f"tasks.source: {_raised(ref, error)}") from error
    if isinstance(made, str | Mapping) or not hasattr(made, "__iter__"):
        raise _Refused(f"tasks.source: {ref.path} returned a {type(made).__name__}; a source returns a list of burnish.types.Task")
    try:
        tasks = split(list(made), held_out=s.tasks.held_out, seed=s.seed)
    except (ValueError, TypeError) as error:
        raise _Refused(f"tasks: {error}") from error
    if len(tasks.train) < s.train.prompts_per_step:
        have = len(tasks.train) + len(tasks.held_out)
        raise _Refused(
            f"tasks: {ref.path} has {have} distinct prompts, but tasks.held_out={s.tasks.held_out} and one step of "
            f"train.prompts_per_step={s.train.prompts_per_step} need {s.tasks.held_out + s.train.prompts_per_step}; "
            "lower one of the two or make the source larger"
        )
    return tasks


def _model(s: Settings) -> Facts:
    try:
        return inspect_model(s.model)
    except ModelError as error:
        text = str(error)
        raise _Refused(text if text.startswith("model.") else f"model: {text}") from error


def _fit(s: Settings, tasks: Split, model: Facts) -> Iterator[str]:
    """Prompts against the model: template, characters, end tokens, and whether prompt and answer fit into the context."""
    prompts = [task.prompt for task in (*tasks.train, *tasks.held_out)]
    if not model.has_chat_template and (messages := sum(not isinstance(p, str) for p in prompts)):
        yield (
            f"tasks: {messages} of {len(prompts)} prompts are lists of messages, but {model.source} has no chat template; "
            "give prompts as text, or a model that was trained to chat"
        )
        return
    samplings = {"sampling": s.sampling, **({"evaluate.sampling": s.evaluate.sampling} if tasks.held_out else {})}
    tokenizer = load_tokenizer(s.model)
    longest = 0
    if tokenizer is None:
        if model.end_token is None and any(one.end_tokens is None for one in samplings.values()):
            yield f"sampling.end_tokens: {model.source} names no end token; name the tokens that end a turn"
    else:
        for name, sampling in samplings.items():
            yield from _end_tokens(name, sampling, tokenizer)
        try:
            longest = max(len(encode_prompt(tokenizer, prompt)) for prompt in _some(prompts))
        except ValueError as error:
            yield f"tasks: a prompt cannot be encoded: {error}"
            return
    for name, sampling in samplings.items():
        if longest + sampling.max_new_tokens > model.context_tokens or sampling.max_new_tokens == model.context_tokens:
            room = model.context_tokens - longest
            prompt = f" and the longest prompt has {longest} tokens" if longest else ""
            mend = f"lower {name}.max_new_tokens to {room} or less" if room > 0 else "shorten the prompts"
            yield (
                f"{name}.max_new_tokens is {sampling.max_new_tokens}{prompt}, but {model.source} has a context of "
                f"{model.context_tokens} tokens; {mend}"
            )


def _end_tokens(name: str, sampling: Sampling, tokenizer: Any) -> Iterator[str]:
    try:
        end_token_ids(tokenizer, sampling.end_tokens)
    except ValueError as error:
        yield str(error).replace("sampling.end_tokens", f"{name}.end_tokens")


def _some(prompts: Sequence[Any]) -> list[Any]:
    """All prompts, or of many the longest in characters and as many spread over the rest."""
    if len(prompts) <= MAX_ENCODED:
        return list(prompts)
    def chars(prompt: Any) -> int:
        return len(prompt) if isinstance(prompt, str) else sum(len(str(message.get("content"))) for message in prompt)

    by_length = sorted(prompts, key=chars, reverse=True)
    half = MAX_ENCODED // 2
    rest = by_length[half:]
    return by_length[:half] + rest[:: max(len(rest) // half, 1)]


# what is said

def _notes(s: Settings, tasks: Split) -> Iterator[str]:
    updates = num_updates(s)
    if s.optim.lr == 0:
        yield "optim.lr is 0: the weights stay as they are"
    if s.optim.warmup_updates >= updates:
        warmup = s.optim.warmup_updates
        yield f"optim.warmup_updates is {warmup}, and the run makes {updates} updates: the learning rate rises to the end"
    if s.sampling.temperature < 0.5:
        yield f"sampling.temperature is {s.sampling.temperature}: samples of one prompt will be much alike, and equal rewards teach nothing"
    if s.train.samples_per_prompt == 2:
        yield "train.samples_per_prompt is 2: where rewards are 0 or 1, at least half of the groups have equal rewards and teach nothing"
    if tasks.num_duplicates:
        yield f"{tasks.num_duplicates} tasks have the prompt of another and are left out"
    if not tasks.held_out:
        yield "tasks.held_out is 0: nothing is measured on tasks that were not trained on"
    else:
        yield from _evaluation_notes(s)


def _evaluation_notes(s: Settings) -> Iterator[str]:
    e, differ = s.evaluate, []
    if e.every_steps > s.train.steps:
        yield f"evaluate.every_steps is {e.every_steps}, but the run has {s.train.steps} steps: it is evaluated before and after only"
    if e.samples_per_task > 1 and (e.sampling.temperature == 0 or e.sampling.top_k == 1):
        count = e.samples_per_task
        yield f"evaluate.samples_per_task is {count}, but evaluate.sampling takes the most probable token: all samples are the same"
    for name in EvalSampling.model_fields:
        if name in ("max_new_tokens", "stop", "end_tokens") and getattr(s.sampling, name) != getattr(e.sampling, name):
            differ.append(name)
    if differ:
        yield f"evaluate.sampling and sampling differ in {', '.join(differ)}: held-out answers end elsewhere than trained ones"


def num_updates(s: Settings) -> int:
    return s.train.steps * s.train.epochs * s.train.minibatches


def _told(s: Settings, tasks: Split, model: Facts) -> Iterator[str]:
    size = f", {model.num_parameters / 1e6:.1f} million parameters" if model.num_parameters else ""
    yield f"model    {model.source}{size}, context {model.context_tokens} tokens"
    yield f"tasks    {len(tasks.train)} to train on, {len(tasks.held_out)} held out"
    t = s.train
    passes = t.steps * t.prompts_per_step / len(tasks.train)
    yield (
        f"run      {t.steps} steps of {t.prompts_per_step} prompts x {t.samples_per_prompt} samples, {num_updates(s)} updates, "
        f"{passes:.1f} passes over the tasks"
    )


def _raised(ref: Ref, error: Exception) -> str:
    """What a part of the user's raised, and where. The package's own errors explain themselves."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and frames[-1].filename.startswith(PACKAGE):
        return str(error)
    own = [frame for frame in frames if not frame.filename.startswith(PACKAGE)]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{ref.path} raised {type(error).__name__}: {error}{where}"
