"""Calling a reward: the one place where whatever a reward does becomes data, in a worker and in the trainer's process alike."""

from __future__ import annotations

import inspect
import math
import numbers
import os
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from burnish.ref import Ref, RefError, check_signature, parameters
from burnish.types import Rollout

PROVIDED = ("rollout", "task")
MAX_ERROR_CHARS = 400

Reward = Callable[[Rollout], Any]
"""A reward function with its values filled in, waiting for the rollout."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call gave: a finite score, or None and the reason."""

    score: float | None
    error: str | None = None


class StopImport(BaseException):
    """Raised where a script that a worker imports would start training; what stands above is defined by then."""


_in_worker = False


def enter_worker() -> None:
    global _in_worker
    _in_worker = True


def stop_in_worker() -> None:
    """Call where training starts, before anything costly. Does nothing outside of a worker.

    A worker that looks for a reward in the user's own script imports that script. Without a main guard the import reaches
    the training code, and ends there.
    """
    if _in_worker:
        raise StopImport


def call(reward: Reward, rollout: Rollout, wait: Callable[[Awaitable[Any]], Any]) -> Answer:
    """Call a reward once. Never raises. `wait` runs an awaitable to its end, for rewards that are async."""
    try:
        value = reward(rollout)
        if inspect.isawaitable(value):
            value = wait(value)
        return read(value)
    except BaseException as error:  # also SystemExit: a reward must not end the process that calls it
        return Answer(None, describe(error))


def read(value: Any) -> Answer:
    """The score in what a reward returned."""
    if value is None:
        return Answer(None, "returned None (could not be scored)")
    if not isinstance(value, numbers.Real):
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:60] + "..."
        return Answer(None, f"TypeError: returned {shown} of type {type(value).__name__}; a reward returns a float, int, bool or None")
    score = float(value)
    if not math.isfinite(score):
        return Answer(None, f"ValueError: returned {score}; a reward returns a finite number, or None when it cannot score")
    return Answer(score)


def describe(error: BaseException) -> str:
    """Type, message and the line of the reward that it came from, in one short line."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "(its message cannot be shown)"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if len(text) > MAX_ERROR_CHARS:
        text = text[:MAX_ERROR_CHARS] + "..."
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = os.path.abspath(frame.f_code.co_filename)
        if not file.startswith(_NOT_OF_THE_REWARD):
            return f"{text} ({os.path.basename(file)}:{line})"
    return text


_STDLIB = os.path.dirname(os.path.abspath(os.__file__))
_NOT_OF_THE_REWARD = tuple(
    os.path.join(folder, "")
    for folder in (os.path.dirname(os.path.abspath(__file__)), os.path.join(_STDLIB, "asyncio"), os.path.join(_STDLIB, "concurrent"))
)


def bind(ref: Ref) -> Reward:
    """Import the reward and check its values. RefError if that fails."""
    return fill_in(ref, ref.load(room="burnish.rewards"))


def fill_in(ref: Ref, fn: Callable[..., Any]) -> Reward:
    """The reward with the values of its reference. RefError for a value it does not take, or an argument nobody provides."""
    if inspect.isclass(fn):
        raise RefError(f"{ref.path} is a class; a reward is a function of (rollout, task), or an object that can be called like one")
    check_signature(ref.path, fn, ref.values, PROVIDED)
    takes = [name for name in PROVIDED if name in parameters(fn)]
    try:
        inspect.signature(fn).bind(**dict.fromkeys(takes), **ref.values)
    except TypeError as error:
        raise RefError(f"{ref.path} cannot be called with {takes} by name: {error}") from error
    return _Bound(fn, takes, ref.values)


class _Bound:
    """Not functools.partial: which of rollout and task are passed is known only here."""

    __slots__ = ("fn", "takes", "values")

    def __init__(self, fn: Callable[..., Any], takes: Iterable[str], values: Mapping[str, Any]) -> None:
        self.fn, self.takes, self.values = fn, tuple(takes), dict(values)

    def __call__(self, rollout: Rollout) -> Any:
        given = {"rollout": rollout, "task": rollout.task}
        return self.fn(**{name: given[name] for name in self.takes}, **self.values)
