"""Written answers: examples, pairs and ratings; their sources, and the split by prompt."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.data.answer_pairs import jsonl_pairs, jsonl_ratings, pairs_of_tasks, ratings_of_tasks, transcripts
from burnish.data.answer_steps import jsonl_steps, steps_of_tasks
from burnish.data.digit_sums import digit_sum_pairs, digit_sum_ratings
from burnish.data.jsonl import as_chat, as_prompt, field_of, kind_of, prompt_of, rows_of
from burnish.data.tasks import Split, answer_id, canonical, lowest
from burnish.ref import Ref
from burnish.types import Example, Pair, Prompt, Rated, Task

__all__ = [
    "digit_sum_pairs", "digit_sum_ratings", "jsonl", "jsonl_pairs", "jsonl_ratings", "jsonl_steps", "of_tasks", "pairs_of_tasks",
    "ratings_of_tasks", "split_answers", "steps_of_tasks", "transcripts",
]

Answer = Example | Pair | Rated

TEXTS: Mapping[type, tuple[str, ...]] = {Example: ("answer",), Pair: ("chosen", "rejected"), Rated: ("answer",)}
"""The answers of each kind, by field."""
TASK_SOURCES = "burnish.data.sources"


def jsonl(
    path: str | Path,
    *,
    prompt: str | None = None,
    answer: str | None = None,
    messages: str | None = None,
    chat: bool = False,
    system: str | None = None,
    limit: int | None = None,
) -> list[Example]:
    """Examples of a file with one JSON object a line (UTF-8, or that in .gz; empty lines are skipped).

    prompt, answer: the fields that hold them; or templates with fields in braces, as "Question: {question}\\nAnswer:". A prompt may
        be a list of {role, content} messages; an answer is a text.
    messages: in place of these two, the field that holds a whole conversation as {role, content}. Its last message, the assistant's,
        is the answer, and all before it is the prompt; earlier turns of the assistant are read and not learned.
    chat: True makes a prompt that is a text a user message, after a system message if one is given.
    limit: read only the first so many examples.

    Raises ValueError with file and line for a line that is not JSON, lacks a field, or holds no usable prompt or answer.
    """
    if (messages is None) == (prompt is None) or (prompt is None) != (answer is None):
        raise ValueError("name the fields of a prompt and its answer (prompt: ..., answer: ...), or that of a conversation (messages: ...)")
    if messages is not None and (chat or system is not None):
        raise ValueError("chat and system are for prompts that are texts; the messages of a conversation are taken as they are")
    out = []
    for where, row in itertools.islice(rows_of(path), limit):
        if messages is not None:
            shown, text = _conversation(field_of(row, messages, where), messages, where)
        else:
            shown, text = as_chat(prompt_of(row, prompt, where), chat=chat, system=system), _text_of(row, answer, where)
        out.append(Example(answer_id(shown, text), shown, text))
    if not out:
        raise ValueError(f"{path} holds no examples")
    return out


def of_tasks(tasks: str | Mapping[str, Any]) -> list[Example]:
    """The prompts of a source of tasks with their answers, as {ref: of_tasks, tasks: {ref: copy_digits, length: 3}}.

    Short names of `tasks`: burnish.data.sources. ValueError for a task whose answer is no text.
    """
    out = []
    for task in Ref.parse(tasks).bind(room=TASK_SOURCES)():
        if not isinstance(task, Task):
            raise ValueError(f"{Ref.parse(tasks).path} gives a {type(task).__name__}; of_tasks takes a source of burnish.types.Task")
        if not isinstance(task.answer, str):
            raise ValueError(
                f"task {task.id} has the answer {task.answer!r}, and what is to be learned is a text; give a source whose answers are texts"
            )
        out.append(Example(answer_id(task.prompt, task.answer), task.prompt, task.answer))
    return out


def _text_of(row: Mapping[str, Any], template: str, where: str) -> str:
    found = prompt_of(row, template, where) if "{" in template else field_of(row, template, where)
    if not isinstance(found, str):
        raise ValueError(
            f"{where}: field {template!r} is {kind_of(found)}; an answer is a text. Use messages for a conversation, or for a number the "
            f"template {{{template}}}"
        )
    if not found:
        raise ValueError(f"{where}: field {template!r} is empty; an answer needs text")
    return found


def _conversation(value: Any, name: str, where: str) -> tuple[Prompt, str]:
    """Messages -> all but the last, and the last one's text."""
    turns = as_prompt(value, name, where)
    if isinstance(turns, str):
        raise ValueError(f"{where}: field {name!r} is a text; a conversation is a list of messages")
    roles = [turn["role"] for turn in turns]
    if len(turns) < 2 or roles[-1] != "assistant":
        raise ValueError(f"{where}: the messages of {name!r} have the roles {roles}; the last is learned, and it is the assistant's answer")
    if not turns[-1]["content"]:
        raise ValueError(f"{where}: the last message of {name!r} is empty; an answer needs text")
    return turns[:-1], turns[-1]["content"]


def split_answers(items: Sequence[Any], *, kinds: tuple[type, ...], held_out: int, seed: int) -> Split:
    """Keep `held_out` of the distinct prompts for evaluation, with all their entries; both sides keep the order of `items`.

    Entries that stand twice, all of them equal, are left out and counted. Raises ValueError for an empty set or one that leaves
    nothing to train on, TypeError for what is none of `kinds` or a mixture of them.
    """
    names = " or ".join(f"burnish.types.{kind.__name__}" for kind in kinds)
    seen: dict[str, Any] = {}
    duplicates = 0
    for position, item in enumerate(items):
        if not isinstance(item, kinds) or type(item) is not type(items[0]):
            raise TypeError(f"item {position} is a {type(item).__name__}, where the source returns a list of {names}, all of one kind")
        _check(position, item)
        if seen.setdefault(item.id, item) is not item:
            if seen[item.id] != item:
                raise ValueError(f"two different entries have the id {item.id!r} (item {position} is the second); give each its own")
            duplicates += 1
    if not seen:
        raise ValueError("the source returned nothing; check its settings (path, filters)")
    prompts = dict.fromkeys(canonical(item.prompt) for item in seen.values())
    if held_out >= len(prompts):
        raise ValueError(
            f"held_out is {held_out}, but the source has {len(prompts)} distinct prompts and at least one must be left to train on; "
            "lower data.held_out or make the source larger"
        )
    kept = lowest(prompts, held_out, seed=seed)
    sides = [[item for item in seen.values() if (canonical(item.prompt) in kept) is side] for side in (False, True)]
    return Split(train=tuple(sides[0]), held_out=tuple(sides[1]), num_duplicates=duplicates)


def _check(position: int, item: Answer) -> None:
    for name in TEXTS[type(item)]:
        if not isinstance(getattr(item, name), str):
            raise TypeError(f"item {position} (id {item.id}): {name} is a {type(getattr(item, name)).__name__}; it is a text")
    if isinstance(item, Pair) and item.chosen == item.rejected:
        raise ValueError(f"item {position} (id {item.id}): chosen and rejected are the same text, which teaches nothing; remove it")
    if isinstance(item, Rated) and item.steps:
        _check_steps(f"item {position} (id {item.id})", item)
    numbers = [item.margin] if isinstance(item, Pair) else list(item.ratings) if isinstance(item, Rated) else []
    if wrong := [n for n in numbers if n is not None and (isinstance(n, bool) or not isinstance(n, int | float))]:
        raise TypeError(f"item {position} (id {item.id}): a rating or margin is {wrong[0]!r}; it is a number, or None if not known")
    if any(n is not None and not math.isfinite(n) for n in numbers):
        raise ValueError(f"item {position} (id {item.id}): a rating or margin is not finite; leave it out (null) where it is not known")


def _check_steps(where: str, item: Rated) -> None:
    ends = (0, *item.steps)
    if any(a >= b for a, b in itertools.pairwise(ends)) or item.steps[-1] > len(item.answer):
        most = len(item.answer)
        raise ValueError(f"{where}: its steps end at the characters {item.steps}; ends increase, up to the {most} of the answer")
    if len(item.ratings) != len(item.steps):
        raise ValueError(f"{where}: {len(item.ratings)} ratings of {len(item.steps)} steps; there is one a step, null where not known")
