"""Where pairs and ratings come from: files in the shapes of the field, and answers of tasks against those of other tasks."""

from __future__ import annotations

import itertools
import math
import random
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from burnish.data.jsonl import as_chat, as_prompt, field_of, kind_of, prompt_of, rows_of
from burnish.data.tasks import answer_id
from burnish.ref import Ref
from burnish.types import Message, Pair, Prompt, Rated, Task

TASK_SOURCES = "burnish.data.sources"
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
NAMES = {role: name for name, role in SPEAKERS.items()}
WANTED: Mapping[Any, bool] = {True: True, False: False, "true": True, "false": False}
"""Labels of KTO's files; 1 and 0 are equal to True and False."""

T = TypeVar("T", Pair, Rated)


def jsonl_pairs(
    path: str | Path,
    *,
    prompt: str | None = "prompt",
    chosen: str = "chosen",
    rejected: str = "rejected",
    margin: str | None = None,
    chat: bool = False,
    system: str | None = None,
    limit: int | None = None,
) -> list[Pair]:
    """Pairs of a file with one JSON object a line (UTF-8, or that in .gz; empty lines are skipped).

    prompt: the field that holds the prompt, a text or a list of {role, content} messages; or a template with fields in braces. None
        (null): chosen and rejected are whole conversations, and what they share before their last message is the prompt.
    chosen, rejected: fields that hold an answer, a text or a list with the assistant's message.
    margin: the field with the number by which chosen was preferred.
    chat: True makes a prompt that is a text a user message, after a system message if one is given.
    limit: read only the first so many pairs.

    Raises ValueError with file and line for a line that is not JSON, lacks a field, or holds no usable prompt or answer.
    """
    out = []
    for where, row in itertools.islice(rows_of(path), limit):
        if prompt is None:
            shown, *answers = _shared(*(as_prompt(field_of(row, name, where), name, where) for name in (chosen, rejected)), where)
        else:
            shown = as_chat(prompt_of(row, prompt, where), chat=chat, system=system)
            answers = [_answer(row, name, where) for name in (chosen, rejected)]
        out.append(_pair(shown, *answers, where, None if margin is None else _number(row, margin, where)))
    return _some(out, path)


def transcripts(
    path: str | Path, *, chosen: str = "chosen", rejected: str = "rejected", chat: bool = False,
    unusable: Literal["refuse", "leave_out"] = "refuse", limit: int | None = None,
) -> list[Pair]:
    """Pairs of a file whose chosen and rejected are dialogues as texts, "\\n\\nHuman: ...\\n\\nAssistant: ..." (Anthropic's hh-rlhf).

    What both share before the last reply is the prompt. chat: True makes it a list of messages, for a model with a chat template; else
    it stays a text that ends with "Assistant:", and the answer begins with its space.
    unusable: what becomes of a line whose two dialogues differ before the last reply, or whose reply is empty: an error, or it is left
    out and a warning tells how many were.
    """
    out, left_out, lines = [], 0, 0
    for where, row in itertools.islice(rows_of(path), limit):
        lines += 1
        try:
            turns = [_turns(field_of(row, name, where), name, where) for name in (chosen, rejected)]
            shown, *answers = _shared(*turns, where)
            if chat:
                shown = tuple(Message(role=m["role"], content=m["content"].strip()) for m in shown)
                answers = [text.strip() for text in answers]
            else:
                shown = "".join(f"\n\n{NAMES[m['role']]}:{m['content']}" for m in shown) + "\n\nAssistant:"
            out.append(_pair(shown, *answers, where, None))
        except _UnusableError as error:
            if unusable == "refuse":
                raise ValueError(f"{error}; with unusable: leave_out such lines are left out") from None
            left_out += 1
    if left_out:
        warnings.warn(f"{path}: {left_out} of {lines} lines are left out: no two replies to one dialogue", stacklevel=2)
    return _some(out, path)


def jsonl_ratings(
    path: str | Path,
    *,
    prompt: str = "prompt",
    answer: str = "completion",
    label: str | None = "label",
    ratings: Sequence[str] = (),
    chat: bool = False,
    system: str | None = None,
    limit: int | None = None,
) -> list[Rated]:
    """Single answers with a judgement, of a file with one JSON object a line, as `jsonl_pairs` reads it.

    answer: the field with the answer, a text or a list with the assistant's message.
    label: the field that tells whether it is wanted: true or false, 1 or 0; None (null) where there is none.
    ratings: fields with numbers; null where one is not known.
    """
    if label is None and not ratings:
        raise ValueError("name the field that judges an answer: label (true or false), or ratings (numbers)")
    out = []
    for where, row in itertools.islice(rows_of(path), limit):
        shown = as_chat(prompt_of(row, prompt, where), chat=chat, system=system)
        text = _answer(row, answer, where)
        wanted = None if label is None else _wanted(field_of(row, label, where), label, where)
        numbers = tuple(None if field_of(row, name, where) is None else _number(row, name, where) for name in ratings)
        out.append(Rated(answer_id(shown, text, str(wanted), str(numbers)), shown, text, wanted, numbers))
    return _some(out, path)


def pairs_of_tasks(tasks: str | Mapping[str, Any], *, swapped_frac: float = 0.0, seed: int = 0) -> list[Pair]:
    """Each task's own answer before another task's, as {ref: pairs_of_tasks, tasks: {ref: copy_digits, length: 3}}.

    swapped_frac: the share of pairs whose labels are swapped, by chance. Short names of `tasks`: burnish.data.sources.
    """
    if not 0 <= swapped_frac < 0.5:
        raise ValueError(f"swapped_frac is {swapped_frac}; from 0 to below 0.5, where nothing is left to learn")
    rng = random.Random(f"pairs {seed}")
    out = []
    for task, own, other in _with_others(tasks, rng):
        chosen, rejected = (other, own) if rng.random() < swapped_frac else (own, other)
        out.append(Pair(answer_id(task.prompt, chosen, rejected), task.prompt, chosen, rejected))
    return out


def ratings_of_tasks(tasks: str | Mapping[str, Any], *, wanted_frac: float = 0.5, seed: int = 0) -> list[Rated]:
    """Each task's own answer, wanted and rated 1, or another task's, unwanted and rated 0; wanted_frac of the tasks have their own."""
    if not 0 < wanted_frac < 1:
        raise ValueError(f"wanted_frac is {wanted_frac}; between 0 and 1, so that there are answers of both kinds")
    rng = random.Random(f"ratings {seed}")
    out = []
    for task, own, other in _with_others(tasks, rng):
        wanted = rng.random() < wanted_frac
        text = own if wanted else other
        out.append(Rated(answer_id(task.prompt, text), task.prompt, text, wanted, (float(wanted),)))
    return out


def _with_others(tasks: str | Mapping[str, Any], rng: random.Random) -> Iterable[tuple[Task, str, str]]:
    """Each task with its answer, and the answer of another one that differs."""
    ref = Ref.parse(tasks)
    made = list(ref.bind(room=TASK_SOURCES)())
    if wrong := next((task for task in made if not isinstance(task, Task) or not isinstance(task.answer, str)), None):
        raise ValueError(f"{ref.path} gives {str(wrong)[:80]}; pairs and ratings are made of tasks whose answers are texts")
    if len({task.answer for task in made}) < 2:
        raise ValueError(f"all answers of {ref.path} are the same, so there is no other one to compare with")
    for task in made:
        other = task.answer
        while other == task.answer:
            other = rng.choice(made).answer
        yield task, task.answer, other


class _UnusableError(ValueError):
    """A line that holds no two answers to one prompt."""


def _pair(prompt: Prompt, chosen: str, rejected: str, where: str, margin: float | None) -> Pair:
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise _UnusableError(f"{where}: the {name} answer is empty; an answer needs text")
    if chosen == rejected:
        raise _UnusableError(f"{where}: the chosen and the rejected answer are the same text, which teaches nothing; remove the line")
    return Pair(answer_id(prompt, chosen, rejected), prompt, chosen, rejected, margin)


def _answer(row: Mapping[str, Any], name: str, where: str) -> str:
    value = field_of(row, name, where)
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: field {name!r} is {kind_of(value)}; an answer is a text or a list with the assistant's message")
    messages = as_prompt(value, name, where)
    if [m["role"] for m in messages] != ["assistant"]:
        raise ValueError(
            f"{where}: {name!r} has messages of {[m['role'] for m in messages]}; an answer is one message, the assistant's. With "
            "prompt: null it is a whole conversation"
        )
    return messages[0]["content"]


def _shared(chosen: Prompt, rejected: Prompt, where: str) -> tuple[Prompt, str, str]:
    """The prompt that two conversations share, and the answer of each."""
    for messages in (chosen, rejected):
        if isinstance(messages, str):
            raise ValueError(f"{where}: with prompt: null both are lists of messages; `transcripts` reads dialogues as texts")
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            roles = [m["role"] for m in messages]
            raise _UnusableError(f"{where}: a conversation ends with the assistant's message, after a prompt; this one has {roles}")
    if chosen[:-1] != rejected[:-1]:
        raise _UnusableError(f"{where}: the two conversations differ before their last message, so there is no one prompt")
    return chosen[:-1], chosen[-1]["content"], rejected[-1]["content"]


def _turns(value: Any, name: str, where: str) -> tuple[Message, ...]:
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {name!r} is {kind_of(value)}; a transcript is a text")
    head, *parts = re.split(r"\n\n(Human|Assistant):", value)
    if head or not parts:
        raise ValueError(f"{where}: field {name!r} begins with {value[:40]!r}; a transcript begins with an empty line and Human:")
    return tuple(Message(role=SPEAKERS[who], content=text) for who, text in zip(parts[::2], parts[1::2], strict=True))


def _wanted(value: Any, name: str, where: str) -> bool:
    key = value.strip().lower() if isinstance(value, str) else value
    if not isinstance(key, str | bool | int) or key not in WANTED:
        raise ValueError(f"{where}: {name} is {value!r}; it is one of true, false, 1, 0")
    return WANTED[key]


def _number(row: Mapping[str, Any], name: str, where: str) -> float:
    value = field_of(row, name, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: field {name!r} is {value!r}; it is a finite number")
    return float(value)


def _some(items: list[T], path: str | Path) -> list[T]:
    if not items:
        raise ValueError(f"{path} holds no entries that can be used")
    return items
