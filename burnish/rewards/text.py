"""Rewards that compare what the policy wrote with the task's answer."""

from __future__ import annotations

import re
from decimal import Decimal

from burnish.types import Rollout, Task

# A sign is part of the number where nothing that could be subtracted from stands before it.
# Commas group thousands; digits of other scripts are not read.
NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z_.)\]])[-+\u2212])?"
    r"[$\u20ac\u00a3]?"
    r"(?<![0-9])(?<![0-9]\.)"
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)


def exact(rollout: Rollout, task: Task, *, strict: bool = True) -> float:
    """1 if the text equals the answer, spaces at both ends aside, else 0.

    strict: False also ignores upper and lower case, the number of spaces, and a full stop at the end.
    Raises ValueError if the task's answer is not a text or a number.
    """
    if not isinstance(task.answer, (str, int, float)) or isinstance(task.answer, bool):
        raise ValueError(f"task {task.id}: exact compares with a text or a number, and the task's answer is {task.answer!r}")
    found, wanted = rollout.text.strip(), str(task.answer).strip()
    if not strict:
        found, wanted = _loose(found), _loose(wanted)
    return float(found == wanted)


def positions(rollout: Rollout, task: Task) -> float:
    """The share of the answer's characters that stand in the text at their place; 0 for a text that is longer than the answer.

    A graded reward, for policies that would never earn the whole one by chance.
    """
    wanted = str(task.answer)
    if len(rollout.text) > len(wanted):
        return 0.0
    return sum(a == b for a, b in zip(rollout.text, wanted, strict=False)) / len(wanted)


def each_position(rollout: Rollout, task: Task) -> list[tuple[int, float]] | float:
    """Each character is a step: its reward is its share of the answer where it is right, else 0. An empty text earns 0.

    The rewards of a right answer's steps add up to 1. A process reward for tests, as `positions` is one for the whole text.
    """
    wanted = str(task.answer)
    steps = [(at + 1, float(c == wanted[at : at + 1]) / len(wanted)) for at, c in enumerate(rollout.text)]
    return steps or 0.0


def last_number(rollout: Rollout, task: Task, *, strict: bool = False, tolerance: float = 0.0) -> float:
    """1 if the last number in the text equals the answer's number, else 0; 0 if the text holds no number.

    strict: the text must be that number and nothing else, spaces aside.
    tolerance: largest absolute difference that counts as equal.
    Reads 1,234.50, -3, .5, 2e-3, $5 and the typographic minus; not fractions or number words. Compares as decimals, so 0.10 equals 0.1.
    Raises ValueError if the task's answer is not a number.
    """
    wanted = answer_number(task)
    found = whole_number(rollout.text) if strict else find_last_number(rollout.text)
    return float(found is not None and abs(found - wanted) <= Decimal(repr(tolerance)))


def answer_number(task: Task) -> Decimal:
    if isinstance(task.answer, (int, float)) and not isinstance(task.answer, bool):
        number = Decimal(repr(task.answer))
    else:
        number = whole_number(task.answer) if isinstance(task.answer, str) else None
    if number is None or not number.is_finite():
        raise ValueError(f"task {task.id}: last_number needs a number as the task's answer, which is {task.answer!r}")
    return number


def find_last_number(text: str) -> Decimal | None:
    found = [*NUMBER.finditer(text)]
    return _value(found[-1]) if found else None


def whole_number(text: str) -> Decimal | None:
    match = NUMBER.fullmatch(text.strip())
    return None if match is None else _value(match)


def _value(match: re.Match[str]) -> Decimal:
    return Decimal(re.sub(r"[,$\u20ac\u00a3]", "", match[0]).replace("\u2212", "-"))


def _loose(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()
