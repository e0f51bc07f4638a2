"""Where tasks come from: reasoning-gym, JSONL files, small puzzles over digits. A source is any function that returns a list of Task."""

from __future__ import annotations

import difflib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.data.generate import generate
from burnish.data.tasks import task_id
from burnish.types import Message, Prompt, Task

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
            shown = _prompt(text, chat=chat, system=system)
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
    """Tasks of a file with one JSON object a line (UTF-8; empty lines are skipped).

    prompt: the field that holds the prompt, a text or a list of {role, content} messages; or a template with fields in braces,
        as "Question: {question}\\nAnswer:".
    answer, info: fields that rewards will see as task.answer and task.info.
    chat: True makes a text a user message, after a system message if one is given.
    limit: read only the first so many tasks.

    Raises ValueError with file and line for a line that is not JSON, lacks a field, or holds no usable prompt.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no such file: {path} (looked from {Path.cwd()})")
    tasks = []
    for where, row in itertools.islice(_rows(path), limit):
        shown = _prompt(_fill(prompt, row, where), chat=chat, system=system)
        tasks.append(
            Task(
                id=task_id(shown, "jsonl"),
                prompt=shown,
                answer=None if answer is None else _field(row, answer, where),
                info={name: _field(row, name, where) for name in info},
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


def _prompt(prompt: Prompt, *, chat: bool, system: str | None) -> Prompt:
    if system is not None and not chat:
        raise ValueError("a system message needs chat: true")
    if not chat or not isinstance(prompt, str):
        return prompt
    head = () if system is None else (Message(role="system", content=system),)
    return (*head, Message(role="user", content=prompt))


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", object) of each line that is not empty."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from None
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected one JSON object a line, found {_kind(row)}")
            yield where, row


def _fill(prompt: str, row: Mapping[str, Any], where: str) -> Prompt:
    if "{" not in prompt:
        return _as_prompt(_field(row, prompt, where), prompt, where)

    def value(match: re.Match[str]) -> str:
        found = _field(row, match[1], where)
        if not isinstance(found, (str, int, float)):
            raise ValueError(f"{where}: field {match[1]!r} is {_kind(found)}; the prompt template needs a text or number there")
        return str(found)

    text, slots = re.subn(r"\{([^{}\s]+)\}", value, prompt)
    if slots == 0:
        raise ValueError(f"the prompt template names no field in braces: {prompt!r}")
    return text


def _as_prompt(value: Any, name: str, where: str) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise ValueError(f"{where}: field {name!r} is empty; a prompt needs text")
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: field {name!r} is {_kind(value)}; a prompt is a text or a list of messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"{where}: each message in {name!r} needs role and content as texts; found {str(message)[:80]}")
    return tuple(Message(role=message["role"], content=message["content"]) for message in value)


def _field(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in row:
        near = difflib.get_close_matches(name, row, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where}: no field {name!r}; it has {sorted(row)}{hint}")
    return row[name]


def _kind(value: Any) -> str:
    return {type(None): "null", dict: "an object", list: "a list", str: "a text", bool: "a truth value"}.get(type(value), "a number")
