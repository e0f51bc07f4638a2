"""What can be known to go wrong before any weight is loaded: references, tasks, the model's facts, pairs that do not go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from burnish.chat.template import by_ids, encode_answer, encode_prompt
from burnish.config import Environment, Sampling, Settings
from burnish.config.errors import SettingsError
from burnish.data.answers import TEXTS, split_answers
from burnish.data.tasks import Split, canonical, digest, split
from burnish.engines.native.guide import Guide, GuideError
from burnish.models.load import Facts, ModelError, load_tokenizer
from burnish.models.load import inspect as inspect_model
from burnish.plan.preferences import learns_from_single, problems_of_preference
from burnish.plan.references import ROOMS, part, problems_of_pairs, problems_of_references, raised, room_of
from burnish.plan.reward_models import problems_of_ratings, problems_of_reward_model
from burnish.plan.teachers import problems_of_teachers
from burnish.plan.told import facts_of, notes_of
from burnish.ref import Ref
from burnish.types import Example, Pair, Prompt, Rated, Task

__all__ = ["ROOMS", "Checked", "check", "environments", "examine"]

MAX_ENCODED = 512


@dataclass(frozen=True, slots=True)
class Checked:
    """What was learnt on the way. `facts` are lines for people; `tasks`, by environment, and `answers` are those the run would use."""

    notes: list[str]
    facts: list[str]
    tasks: Mapping[str, Split]
    answers: Split | None
    model: Facts

    @property
    def held_out_tasks(self) -> int:
        return sum(len(split.held_out) for split in self.tasks.values())

    @property
    def num_train(self) -> int:
        return len(self.answers.train) if self.answers is not None else sum(len(split.train) for split in self.tasks.values())

    @property
    def num_held_out(self) -> int:
        return len(self.answers.held_out) if self.answers is not None else self.held_out_tasks

    @property
    def digests(self) -> dict[str, str]:
        """One text for each source: which items stand on which side and in what order."""
        named = {f"tasks {name}" if name else "tasks": split for name, split in self.tasks.items()}
        return {name: digest(one) for name, one in (named | ({"answers": self.answers} if self.answers else {})).items()}


def check(settings: Settings) -> list[str]:
    """Notes on settings that can work but may not do what was meant. SettingsError with all that cannot work."""
    return examine(settings).notes


def examine(settings: Settings) -> Checked:
    """As check, with what was learnt. Imports every part, makes the tasks, reads the model's configuration, loads no weights."""
    looks = (problems_of_references, problems_of_preference, problems_of_reward_model, problems_of_pairs, problems_of_teachers)
    problems = [problem for look in looks for problem in look(settings)]
    tasks = {e.name: _attempt(problems, partial(_tasks, settings), e) for e in environments(settings)}
    answers = _attempt(problems, partial(_answers, settings), tasks) if settings.data is not None else None
    model = _attempt(problems, _model, settings)
    if model is not None and None not in tasks.values() and (answers is not None or settings.data is None):
        problems += _fit(settings, tasks, answers, model)
    if problems:
        raise SettingsError(problems)
    notes, facts = list(notes_of(settings, tasks, answers)), list(facts_of(settings, tasks, answers, model))
    return Checked(notes, facts, tasks, answers, model)


class _Refused(Exception):
    """A problem that ends the look at one thing; the others go on."""


def _attempt(problems: list[str], look: Callable[[Any], Any], at: Any) -> Any | None:
    try:
        return look(at)
    except _Refused as refused:
        problems.append(str(refused))
        return None


# tasks and model

def environments(s: Settings) -> tuple[Environment, ...]:
    """Where tasks come from: those of the settings, or one without a name, of tasks, env and rewards."""
    if s.environments or s.tasks is None:
        return s.environments
    return (Environment.model_construct(
        name="", tasks=s.tasks, env=s.env, rewards=s.rewards, algo=None, prompts_per_step=s.train.prompts_per_step or 1
    ),)


def _made(place: str, ref: Ref, kinds: tuple[type, ...]) -> list[Any]:
    for problem in part(place, ref, ()):
        raise _Refused(problem)
    try:
        made = ref.bind(room=room_of(place))()
    except Exception as error:
        raise _Refused(f"{place}: {raised(ref, error)}") from error
    if isinstance(made, str | Mapping) or not hasattr(made, "__iter__"):
        what = " or ".join(f"burnish.types.{kind.__name__}" for kind in kinds)
        raise _Refused(f"{place}: {ref.path} returned a {type(made).__name__}; a source returns a list of {what}")
    return list(made)


def _tasks(s: Settings, e: Environment) -> Split:
    place = "tasks" if not e.name else f"environments.{s.environments.index(e)}.tasks"
    made = _made(f"{place}.source", e.tasks.source, (Task,))
    try:
        tasks = split(made, held_out=e.tasks.held_out, seed=s.seed)
    except (ValueError, TypeError) as error:
        raise _Refused(f"{place}: {error}") from error
    if s.loop == "sync" and len(tasks.train) < e.prompts_per_step:
        have, where = len(tasks.train) + len(tasks.held_out), "train" if not e.name else f"environments.{s.environments.index(e)}"
        raise _Refused(
            f"{place}: {e.tasks.source.path} has {have} distinct prompts, but {place}.held_out={e.tasks.held_out} and one step of "
            f"{where}.prompts_per_step={e.prompts_per_step} need {e.tasks.held_out + e.prompts_per_step}; "
            "lower one of the two or make the source larger"
        )
    return tasks


def _answers(s: Settings, tasks: Mapping[str, Split | None]) -> Split:
    single = s.preference is not None and learns_from_single(s.preference)
    kinds = {
        "sft": (Example,), "distill": (Example,), "preference": (Rated,) if single else (Pair,), "reward_model": (Pair, Rated),
    }[s.loop]
    made = _made("data.source", s.data.source, kinds)
    try:
        found = split_answers(made, kinds=kinds, held_out=s.data.held_out, seed=s.seed)
    except (ValueError, TypeError) as error:
        raise _Refused(f"data: {error}") from error
    asked = {canonical(task.prompt) for one in tasks.values() if one is not None for task in one.held_out}
    train = tuple(item for item in found.train if canonical(item.prompt) not in asked)
    found = replace(found, train=train, num_asked=len(found.train) - len(train))
    if single and (unknown := sum(item.wanted is None for item in (*found.train, *found.held_out))):
        loss = s.preference.losses[0].fn.path
        raise _Refused(f"data: {unknown} entries of {s.data.source.path} do not say whether they are wanted, and {loss} needs that")
    for problem in problems_of_ratings(s, found) if s.reward_model is not None else ():
        raise _Refused(problem)
    if len(found.train) < s.train.examples_per_step:
        raise _Refused(
            f"data: {s.data.source.path} leaves {len(found.train)} to train on, but one step takes "
            f"train.examples_per_step={s.train.examples_per_step}; lower it, or data.held_out, or make the source larger"
        )
    return found


def _model(s: Settings) -> Facts:
    try:
        return inspect_model(s.model)
    except ModelError as error:
        text = str(error)
        raise _Refused(text if text.startswith("model.") else f"model: {text}") from error


def _fit(s: Settings, tasks: Mapping[str, Split], answers: Split | None, model: Facts) -> Iterator[str]:
    """Prompts against the model: template, characters, end tokens, and whether prompt and answer fit into the context."""
    used = [task for one in tasks.values() for task in (*(one.train if s.loop == "sync" else ()), *one.held_out)]
    if answers is not None:
        used += [*answers.train, *answers.held_out]
    prompts = [item.prompt for item in used]
    if not model.has_chat_template and (messages := sum(not isinstance(p, str) for p in prompts)):
        yield (
            f"tasks: {messages} of {len(prompts)} prompts are lists of messages, but {model.source} has no chat template; "
            "give prompts as text, or a model that was trained to chat"
        )
        return
    held_out = any(one.held_out for one in tasks.values())
    samplings = {**({"sampling": s.sampling} if s.samples else {}), **({"evaluate.sampling": s.evaluate.sampling} if held_out else {})}
    ends = samplings | ({"evaluate.sampling": s.evaluate.sampling} if answers is not None else {})
    tokenizer = load_tokenizer(s.model)
    longest = 0
    if tokenizer is None:
        if model.end_token is None and any(one.end_tokens is None for one in ends.values()):
            yield f"sampling.end_tokens: {model.source} names no end token; name the tokens that end a turn"
    else:
        for name, sampling in ends.items():
            yield from _tokens(name, sampling, tokenizer)
        try:
            longest = max(len(encode_prompt(tokenizer, prompt)) for prompt in _some(prompts, _chars))
        except ValueError as error:
            yield f"{'tasks' if answers is None else 'data'}: a prompt cannot be encoded: {error}"
            return
        if answers is not None:
            yield from _written(s, [*answers.train, *answers.held_out], tokenizer, model)
    for name, sampling in samplings.items():
        if longest + sampling.max_new_tokens > model.context_tokens or sampling.max_new_tokens == model.context_tokens:
            room = model.context_tokens - longest
            prompt = f" and the longest prompt has {longest} tokens" if longest else ""
            mend = f"lower {name}.max_new_tokens to {room} or less" if room > 0 else "shorten the prompts"
            yield (
                f"{name}.max_new_tokens is {sampling.max_new_tokens}{prompt}, but {model.source} has a context of "
                f"{model.context_tokens} tokens; {mend}"
            )


def _tokens(name: str, sampling: Sampling, tokenizer: Any) -> Iterator[str]:
    """Names of tokens that the vocabulary does not have, and a guide that it cannot follow."""
    try:
        ends = by_ids(sampling, tokenizer).end_tokens
        if sampling.guide is not None:
            Guide(tokenizer, vocab_size=len(tokenizer), end_token_ids=ends, **sampling.guide.model_dump(exclude_none=True))
    except GuideError as error:
        yield f"{name}.{error}"
    except ValueError as error:
        yield str(error).replace("sampling.", f"{name}.", 1)


def _written(s: Settings, items: Sequence[Any], tokenizer: Any, model: Facts) -> Iterator[str]:
    """Answers against the model: characters, and whether any is short enough to be learned."""
    most = min(s.data.max_tokens or model.context_tokens, model.context_tokens)
    if s.data.max_tokens is not None and s.data.max_tokens > model.context_tokens:
        yield f"data.max_tokens is {s.data.max_tokens}, but {model.source} has a context of {model.context_tokens} tokens; lower it"
    texts = [(item.prompt, getattr(item, name)) for item in items for name in TEXTS[type(item)]]
    try:
        lengths = [len(encode_answer(tokenizer, *text, end=0)[0]) for text in _some(texts, lambda text: _chars(text[0]) + len(text[1]))]
    except ValueError as error:
        yield f"data: an answer cannot be encoded: {error}"
        return
    if min(lengths) > most:
        what = "data.max_tokens" if s.data.max_tokens else f"the context of {model.source}"
        yield f"data: with their prompts all answers are longer than {what}, {most} tokens; the shortest looked at has {min(lengths)}"


def _chars(prompt: Prompt) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(str(message.get("content"))) for message in prompt)


def _some(items: Sequence[Any], chars: Callable[[Any], int]) -> list[Any]:
    """All items, or of many the longest in characters and as many spread over the rest."""
    if len(items) <= MAX_ENCODED:
        return list(items)
    by_length = sorted(items, key=chars, reverse=True)
    half = MAX_ENCODED // 2
    rest = by_length[half:]
    return by_length[:half] + rest[:: max(len(rest) // half, 1)]
