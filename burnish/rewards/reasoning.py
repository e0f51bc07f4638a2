"""The scorers of reasoning-gym. Some evaluate the policy's text as Python: such answers are read first, and code is refused."""

from __future__ import annotations

import ast
import functools
import json
import re
from typing import Any

from burnish.data.generate import INSTALL, create, unpack
from burnish.ref import RefError
from burnish.rewards.text import find_last_number
from burnish.types import Rollout, Task

try:
    import reasoning_gym as _library  # noqa: F401  here, so that a worker imports it before the time of a call runs
except ImportError as error:
    raise RefError(f"{INSTALL} ({error})") from None

EVALUATED = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
ARITHMETIC = frozenset({"countdown", "puzzle24"})
ALGEBRA = frozenset({"simple_integration", "intermediate_integration", "polynomial_multiplication"})
FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "asec", "acsc", "acot", "sinh", "cosh", "tanh"}
    | {"asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs", "erf", "erfi", "Si", "Ci"}
)
NAMES = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") | {"pi"}
MAX_EXPONENT = 200
MAX_ANSWER_CHARS = 20_000

FIND = ("text", "first_line", "last_line", "tag", "last_number")


def reasoning_gym(
    rollout: Rollout, task: Task, *, find: str = "text", strict: bool = False, unreadable: float | None = None
) -> float | None:
    """The dataset's own score of the answer found in the text, in [0, 1]. For tasks of sources.reasoning_gym.

    find: where the answer stands: "text" (all of it), "first_line", "last_line", "tag" (inside <answer></answer>, the last one),
        "last_number". No answer found scores 0. Spaces at both ends are left out.
    strict: True turns anything less than the full score into 0; many datasets pay a little for junk.
    unreadable: the score where the scorer raises on the answer; None: not scored, with its error shown.

    Differs from the library where that is unsafe or pays for nothing. The reference answer itself scores 1. An answer that is code
    rather than a value scores 0, and so does an unsolved Integral(...). game_of_life_halting compares with the reference (the
    library pays any text), and nan is no complex number (the library pays it in full).
    Raises ValueError for a task of another source.
    """
    if find not in FIND:
        raise ValueError(f"find is {find!r}; it is one of {', '.join(FIND)}")
    if not {"dataset", "config", "entry"} <= task.info.keys():
        raise ValueError(f"task {task.id} does not come from reasoning-gym: its info has {sorted(task.info)}")
    name, gold = task.info["dataset"], task.info["entry"]["answer"]
    answer = _find(rollout.text, find)
    if isinstance(gold, str) and answer == gold.strip():
        return 1.0
    if not answer or len(answer) > MAX_ANSWER_CHARS or not is_harmless(name, answer):
        return 0.0
    if name == "game_of_life_halting":
        return float(answer.casefold() == str(gold).casefold())
    try:
        score = float(_dataset(name, json.dumps(task.info["config"], sort_keys=True)).score_answer(answer, unpack(task.info["entry"])))
    except Exception:
        if unreadable is None:
            raise
        score = unreadable
    return float(score >= 1.0) if strict else score


def is_harmless(dataset: str, answer: str) -> bool:
    """Whether the dataset's scorer may see the answer. Those that evaluate it get literals, or arithmetic of bounded size, only."""
    if dataset == "complex_arithmetic":
        return not re.search("nan|inf", answer.casefold())
    if dataset not in EVALUATED | ARITHMETIC | ALGEBRA:
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # No Python: eval fails on it too, and the rest of the scorer only compares texts. sympy reads more than Python does
        return dataset in EVALUATED
    try:
        return _is_literal(answer) if dataset in EVALUATED else _is_formula(tree, letters=dataset in ALGEBRA)
    except RecursionError:
        return False


def _is_literal(answer: str) -> bool:
    try:
        ast.literal_eval(answer.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return False
    return True


def _is_formula(node: ast.expr, *, letters: bool) -> bool:
    """Numbers, + - * /, and with letters also single-letter names, powers and elementary functions."""
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _is_formula(operand, letters=letters)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _is_formula(left, letters=letters) and _is_formula(right, letters=letters)
        case ast.BinOp(left=left, op=ast.Pow(), right=right) if letters:
            return _is_formula(left, letters=True) and _is_formula(right, letters=True) and _is_bounded_power(left, right)
        case ast.Name(id=name):
            return letters and name in NAMES
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            return letters and name in FUNCTIONS and _is_formula(argument, letters=True)
    return False


def _is_bounded_power(base: ast.expr, exponent: ast.expr) -> bool:
    """No towers of numbers: 9**9**9 has more digits than fit anywhere."""
    inside = list(ast.walk(exponent))
    if any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow | ast.Mult) and not _has_letters(n) for n in inside):
        return False
    if any(isinstance(n, ast.Constant) and abs(n.value) > MAX_EXPONENT for n in inside):
        return False
    return _has_letters(base) or not any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow) for n in ast.walk(base))


def _has_letters(node: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id not in FUNCTIONS for n in ast.walk(node))


def _find(text: str, find: str) -> str:
    text = text.strip()
    match find:
        case "first_line":
            return text.split("\n", 1)[0].strip()
        case "last_line":
            return text.rsplit("\n", 1)[-1].strip()
        case "tag":
            inside = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
            return inside[-1].strip() if inside else ""
        case "last_number":
            number = find_last_number(text)
            return "" if number is None else format(number, "f") if abs(number.adjusted()) < 100 else str(number)
    return text


@functools.lru_cache(maxsize=64)
def _dataset(name: str, config: str) -> Any:
    return create(name, size=1, seed=0, **json.loads(config))
