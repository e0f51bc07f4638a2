"""Where tasks come from: reasoning-gym, JSONL files, small puzzles over digits. A source is any function that returns a list of Task."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.data.generate import generate
from burnish.data.jsonl import as_chat, field_of, prompt_of, rows_of
from burnish.data.tasks import task_id
from burnish.types import Task

MAX_PUZZLES = 200_000


def reasoning_gym(
    datasets: Sequence[str | Mapping[str, Any]] | Mapping[str, Mapping[str, Any] | None],
    *,
    size: int,
    seed: int = 0,
    prompt: str = "{question}",
    chat: bool = False,
    system: str | None = None,
) -> list[Task]:
    """Tasks of reasoning-gym's procedural datasets, the same for the same arguments in every process.

    datasets: names, or mappings with `name`, optionally `weight` (its share of `size`; 1), and the dataset's own settings. Or one
        mapping from name to settings.
    size: tasks in all. Small task spaces repeat themselves; `split` leaves repetitions out.
    prompt: what the policy sees, with {question} where the question goes; other braces stay as they are.
    chat: True makes it a user message, after a system message if one is given.

    `answer` is the dataset's own, None where it has none. `info` holds dataset, config and entry for rewards.reasoning_gym.
    """
    wanted = _datasets(datasets)
    _check_prompt(prompt, "{question}")
    if size < len(wanted):
        raise ValueError(f"size is {size} for {len(wanted)} datasets; each needs at least one task")
    counts = _shares(size, [weight for _, weight, _ in wanted])
    requests = [{"name": n, "size": c, "seed": seed, "config": config} for (n, _, config), c in zip(wanted, counts, strict=True)]
    tasks = []
    for (name, _, config), entries in zip(wanted, generate(requests), strict=True):
        for entry in entries:
            text = prompt.replace("{question}", entry["question"])
            shown = as_chat(text, chat=chat, system=system)
            info = {"dataset": name, "config": config, "entry": entry}
            tasks.append(Task(id=task_id(shown, f"reasoning_gym/{name}"), prompt=shown, answer=entry["answer"], info=info))
    return _interleave(tasks, counts)


def jsonl(
    path: str | Path,
    *,
    prompt: str,
    answer: str | None = None,
    info: Sequence[str] = (),
    chat: bool = False,
    system: str | None = None,
    limit: int | None = None,
) -> list[Task]:
    """Tasks of a file with one JSON object a line (UTF-8, or that in .gz; empty lines are skipped).

    prompt: the field that holds the prompt, a text or a list of {role, content} messages; or a template with fields in braces,
        as "Question: {question}\\nAnswer:".
    answer, info: fields that rewards will see as task.answer and task.info.
    chat: True makes a text a user message, after a system message if one is given.
    limit: read only the first so many tasks.

    Raises ValueError with file and line for a line that is not JSON, lacks a field, or holds no usable prompt.
    """
    tasks = []
    for where, row in itertools.islice(rows_of(path), limit):
        shown = as_chat(prompt_of(row, prompt, where), chat=chat, system=system)
        tasks.append(
            Task(
                id=task_id(shown, "jsonl"),
                prompt=shown,
                answer=None if answer is None else field_of(row, answer, where),
                info={name: field_of(row, name, where) for name in info},
            )
        )
    if not tasks:
        raise ValueError(f"{path} holds no tasks")
    return tasks


def copy_digits(
    *, length: int = 3, alphabet: str = "0123456789", size: int | None = None, seed: int = 0, prompt: str = "{text}>"
) -> list[Task]:
    """312> is answered by 312. All texts of that length over the alphabet, or `size` different ones of them."""
    return _puzzles("copy", str, length=length, alphabet=alphabet, size=size, seed=seed, prompt=prompt)


def reverse_digits(
    *, length: int = 3, alphabet: str = "0123456789", size: int | None = None, seed: int = 0, prompt: str = "{text}>"
) -> list[Task]:
    """312> is answered by 213. All texts of that length over the alphabet, or `size` different ones of them."""
    return _puzzles("reverse", lambda text: text[::-1], length=length, alphabet=alphabet, size=size, seed=seed, prompt=prompt)


def sort_digits(
    *, length: int = 3, alphabet: str = "0123456789", size: int | None = None, seed: int = 0, prompt: str = "{text}>"
) -> list[Task]:
    """312> is answered by 123: in the order of the alphabet. All texts of that length, or `size` different ones of them."""

    def solve(text: str) -> str:
        return "".join(sorted(text, key=alphabet.index))

    return _puzzles("sort", solve, length=length, alphabet=alphabet, size=size, seed=seed, prompt=prompt)


def _puzzles(
    name: str, solve: Callable[[str], str], *, length: int, alphabet: str, size: int | None, seed: int, prompt: str
) -> list[Task]:
    _check_prompt(prompt, "{text}")
    if length < 1 or len(set(alphabet)) != len(alphabet) or not alphabet:
        raise ValueError(f"length is {length} and alphabet {alphabet!r}; need a length of at least 1 and different characters")
    base = len(alphabet)
    space = base**length
    count = space if size is None else size
    if not 1 <= count <= space:
        raise ValueError(f"size is {size}; there are {space} texts of length {length} over {base} characters")
    if count > MAX_PUZZLES:
        raise ValueError(f"{count} tasks, but a list should hold at most {MAX_PUZZLES}; give size: so many are drawn from the seed")
    numbers = range(space) if size is None else random.Random(f"{name} {seed}").sample(range(space), count)
    tasks = []
    for number in numbers:
        text = "".join(alphabet[number // base**place % base] for place in reversed(range(length)))
        shown = prompt.replace("{text}", text)
        tasks.append(Task(id=task_id(shown, name), prompt=shown, answer=solve(text)))
    return tasks


def _datasets(given: Any) -> list[tuple[str, float, dict[str, Any]]]:
    """(name, weight, config) of each dataset asked for."""
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping):
        given = [{"name": name, **(config or {})} for name, config in given.items()]
    out = []
    for item in given:
        config = {"name": item} if isinstance(item, str) else dict(item)
        name, weight = config.pop("name", None), config.pop("weight", 1.0)
        if not isinstance(name, str):
            raise ValueError(f"each dataset needs a name, as {{name: chain_sum, max_terms: 2}}; found {item!r}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
            raise ValueError(f"dataset {name}: weight is {weight!r}; it must be a positive number")
        if taken := {"size", "seed"} & config.keys():
            raise ValueError(f"dataset {name}: {sorted(taken)} stand beside `datasets`, once for all; give a dataset its share by `weight`")
        out.append((name, float(weight), config))
    if not out:
        raise ValueError("datasets is empty; name at least one, as [chain_sum]")
    return out


def _shares(size: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to the weights that sum to size, each at least 1."""
    spare = size - len(weights)
    exact = [spare * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_rest = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_rest[: spare - sum(counts)]:
        counts[i] += 1
    return [1 + count for count in counts]


def _interleave(tasks: Sequence[Task], counts: Sequence[int]) -> list[Task]:
    """Datasets evenly mixed, so that an unshuffled cursor does not visit them one after the other."""
    place = [(i + 0.5) / count for count in counts for i in range(count)]
    return [tasks[i] for i in sorted(range(len(tasks)), key=lambda i: (place[i], i))]


def _check_prompt(prompt: str, slot: str) -> None:
    if slot not in prompt:
        raise ValueError(f"prompt must contain {slot}, where the task's own text goes; found {prompt!r}")
