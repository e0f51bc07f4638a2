"""Tasks: stable ids, a split into train and held-out by content, and the cursor that hands them out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from burnish.types import Prompt, Task


def canonical(prompt: Prompt) -> str:
    """One text for one prompt, the same in every process: texts are equal exactly where prompts are."""
    if isinstance(prompt, str):
        return json.dumps(prompt)
    return json.dumps([dict(message) for message in prompt], sort_keys=True)


def task_id(prompt: Prompt, dataset: str) -> str:
    """16 hex digits of the content: the same task has the same id in any run."""
    return blake2b(json.dumps([dataset, canonical(prompt)]).encode(), digest_size=8).hexdigest()


def answer_id(prompt: Prompt, *answers: str) -> str:
    """16 hex digits of the content: the same entry has the same id in any run."""
    return blake2b(json.dumps([canonical(prompt), *answers]).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Split:
    """No prompt stands on both sides; of tasks, none stands twice.

    What was left out: num_duplicates because it stood before, num_asked because its prompt is that of a held-out task.
    """

    train: tuple[Any, ...]         # Task, Example, Pair or Rated
    held_out: tuple[Any, ...]
    num_duplicates: int = 0
    num_asked: int = 0


def digest(split: Split) -> str:
    """One text for which tasks stand on which side and in what order."""
    ids = [[task.id for task in side] for side in (split.train, split.held_out)]
    return blake2b(json.dumps(ids).encode(), digest_size=16).hexdigest()


def split(tasks: Sequence[Task], *, held_out: int, seed: int) -> Split:
    """Keep `held_out` of the distinct prompts for evaluation: those with the lowest hash of (seed, prompt).

    Which side a prompt falls on depends on the seed and the set of prompts, not on their order. Both sides keep the order of `tasks`.
    Raises ValueError for an empty set or one that leaves nothing to train on, TypeError for what is not a Task.
    """
    unique: dict[str, Task] = {}
    by_id: dict[str, Task] = {}
    for position, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TypeError(f"item {position} of the task source is a {type(task).__name__}; a source returns a list of burnish.types.Task")
        if not isinstance(task.id, str):
            raise TypeError(f"item {position} of the task source has the id {task.id!r}; an id is a text")
        try:
            json.dumps([task.answer, dict(task.info)], allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            why = "answer and info must be plain JSON data, which rewards and the rollout files get"
            raise TypeError(f"task {task.id}: {why} ({error})") from None
        if unique.setdefault(canonical(task.prompt), task) is task and by_id.setdefault(task.id, task) is not task:
            raise ValueError(
                f"two tasks with different prompts have the id {task.id!r} (item {position} is the second); random numbers and results "
                "are kept by id, so give each task its own"
            )
    if not unique:
        raise ValueError("the task source returned no tasks; check its settings (size, path, filters)")
    if held_out < 0:
        raise ValueError(f"held_out is {held_out}; it must be at least 0")
    if held_out >= len(unique):
        raise ValueError(
            f"held_out is {held_out}, but the source has {len(unique)} distinct prompts among its {len(tasks)} tasks and at least one "
            f"must be left to train on; lower tasks.held_out or make the source larger"
        )
    kept = lowest(unique, held_out, seed=seed)
    return Split(
        train=tuple(task for text, task in unique.items() if text not in kept),
        held_out=tuple(task for text, task in unique.items() if text in kept),
        num_duplicates=len(tasks) - len(unique),
    )


def lowest(texts: Iterable[str], n: int, *, seed: int) -> frozenset[str]:
    """The n texts with the lowest hash of (seed, text)."""
    return frozenset(sorted(texts, key=_hash_of(seed))[:n])


class Cursor:
    """Hands out tasks, or anything with an id, each once an epoch; `position`, the number handed out so far, is its whole state.

    shuffle: a new order each epoch, which depends on (seed, epoch, task ids) only; False: the order of `tasks`.
    """

    def __init__(self, tasks: Sequence[Any], *, seed: int, shuffle: bool, position: int = 0) -> None:
        if not tasks:
            raise ValueError("a cursor needs at least one task")
        if position < 0:
            raise ValueError(f"position is {position}; it counts the tasks handed out and cannot be negative")
        self._tasks, self._seed, self._shuffle = tuple(tasks), seed, shuffle
        self._order: tuple[Any, ...] = ()
        self._order_epoch = -1
        self.position = position

    @property
    def epoch(self) -> int:
        """Of the next task; 0 first."""
        return self.position // len(self._tasks)

    def next(self, n: int) -> list[Any]:
        """The next n tasks; goes on into the next epoch where one ends."""
        out: list[Any] = []
        while len(out) < n:
            start = self.position % len(self._tasks)
            part = self._order_of(self.epoch)[start : start + n - len(out)]
            out += part
            self.position += len(part)
        return out

    def _order_of(self, epoch: int) -> tuple[Any, ...]:
        if not self._shuffle:
            return self._tasks
        if epoch != self._order_epoch:
            rank = _hash_of(self._seed, epoch)
            self._order = tuple(sorted(self._tasks, key=lambda task: rank(task.id)))
            self._order_epoch = epoch
        return self._order


def _hash_of(*salt: int) -> Callable[[str], bytes]:
    head = json.dumps(salt)
    return lambda text: blake2b((head + text).encode(), digest_size=16).digest()
