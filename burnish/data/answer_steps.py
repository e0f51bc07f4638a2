"""Where answers with judged steps come from: files, and answers of tasks that go wrong from some step on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.data.jsonl import as_chat, field_of, kind_of, prompt_of, rows_of
from burnish.data.tasks import answer_id
from burnish.ref import Ref
from burnish.types import Rated, Task

TASK_SOURCES = "burnish.data.sources"


def jsonl_steps(
    path: str | Path,
    *,
    prompt: str = "prompt",
    steps: str = "completions",
    labels: str = "labels",
    between: str = "\n",
    chat: bool = False,
    system: str | None = None,
    limit: int | None = None,
) -> list[Rated]:
    """Answers with a class for each step, of a file with one JSON object a line (UTF-8, or that in .gz; empty lines are skipped).

    prompt: the field that holds the prompt, a text or a list of {role, content} messages; or a template with fields in braces.
    steps, labels: the fields with the list of steps, each a text, and with their classes: true and false, or 0, 1, ...; null where
        one is not known.
    between: stands after each step and belongs to it.
    chat: True makes a prompt that is a text a user message, after a system message if one is given.
    limit: read only the first so many answers.

    Raises ValueError with file and line for a line that is not JSON, lacks a field, or holds no usable steps.
    """
    out = []
    for where, row in itertools.islice(rows_of(path), limit):
        shown = as_chat(prompt_of(row, prompt, where), chat=chat, system=system)
        texts, classes = _list(row, steps, where), _list(row, labels, where)
        if not texts or not all(isinstance(text, str) and text + between for text in texts):
            raise ValueError(f"{where}: {steps} holds {str(texts)[:60]}; it is a list of texts, one a step")
        if len(texts) != len(classes):
            raise ValueError(f"{where}: {len(texts)} {steps} have {len(classes)} {labels}; there is one a step, null where not known")
        if wrong := [label for label in classes if label is not None and not isinstance(label, bool | int | float)]:
            raise ValueError(f"{where}: {labels} holds {wrong[0]!r}; a class is true or false, or 0, 1, ...")
        out.append(_rated(shown, [text + between for text in texts], [None if c is None else float(c) for c in classes]))
    if not out:
        raise ValueError(f"{path} holds no entries that can be used")
    return out


def steps_of_tasks(tasks: str | Mapping[str, Any], *, wrong_frac: float = 0.5, seed: int = 0) -> list[Rated]:
    """Each task's answer, one character a step; wrong_frac of the steps are another character, and their class is 0 in place of 1.

    As {ref: steps_of_tasks, tasks: {ref: copy_digits, length: 3}}. Short names of `tasks`: burnish.data.sources.
    """
    if not 0 < wrong_frac < 1:
        raise ValueError(f"wrong_frac is {wrong_frac}; between 0 and 1, so that there are steps of both classes")
    ref, rng, out = Ref.parse(tasks), random.Random(f"steps {seed}"), []
    made = list(ref.bind(room=TASK_SOURCES)())
    if wrong := next((task for task in made if not isinstance(task, Task) or not isinstance(task.answer, str) or not task.answer), None):
        raise ValueError(f"{ref.path} gives {str(wrong)[:80]}; steps are made of tasks whose answers are texts")
    alphabet = sorted({c for task in made for c in task.answer})
    if len(alphabet) < 2:
        raise ValueError(f"all answers of {ref.path} are of one character, so there is no wrong one")
    for task in made:
        right = [rng.random() >= wrong_frac for _ in task.answer]
        texts = [c if ok else rng.choice([o for o in alphabet if o != c]) for c, ok in zip(task.answer, right, strict=True)]
        out.append(_rated(task.prompt, texts, [float(ok) for ok in right]))
    return out


def _rated(prompt: Any, steps: Sequence[str], labels: Sequence[float | None]) -> Rated:
    text, ends = "".join(steps), tuple(itertools.accumulate(map(len, steps)))
    return Rated(answer_id(prompt, text, str(ends), str(labels)), prompt, text, ratings=tuple(labels), steps=ends)


def _list(row: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = field_of(row, name, where)
    if not isinstance(value, list):
        raise ValueError(f"{where}: field {name!r} is {kind_of(value)}; it is a list with one entry a step")
    return value
