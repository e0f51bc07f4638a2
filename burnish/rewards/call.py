"""Calling a reward: the one place where whatever a reward does becomes data, in a worker and in the trainer's process alike."""

from __future__ import annotations

import inspect
import itertools
import math
import numbers
import os
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.ref import Ref, RefError, check_signature, parameters
from burnish.types import Rollout

PROVIDED = ("rollout", "task", "rollouts")
MAX_ERROR_CHARS = 400
RETURNS = "a reward returns a float, int, bool or None, or the rewards of its steps as a list of [end_chars, value]"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call gave: a finite score, or None and the reason.

    steps: rewards of steps, whose sum is the score: characters of what the policy wrote up to a step's end, value.
    """

    score: float | None
    error: str | None = None
    steps: tuple[tuple[int, float], ...] = ()


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


def call(reward: Reward, rollouts: Sequence[Rollout], wait: Callable[[Awaitable[Any]], Any]) -> list[Answer]:
    """Call a reward once, for all the rollouts where it takes many, else for the only one. Never raises.

    `wait` runs an awaitable to its end, for rewards that are async.
    """
    try:
        value = reward(rollouts)
        if inspect.isawaitable(value):
            value = wait(value)
        values = list(value) if reward.takes_many else [value]
        if len(values) != len(rollouts):
            raise ValueError(f"returned {len(values)} values for {len(rollouts)} rollouts; it returns one a rollout, in their order")
        return [read(value) for value in values]
    except BaseException as error:  # also SystemExit: a reward must not end the process that calls it
        return [Answer(None, describe(error))] * len(rollouts)


def read(value: Any) -> Answer:
    """The score in what a reward returned for one rollout. Where it takes many, an exception tells why one has none."""
    if value is None:
        return Answer(None, "returned None (could not be scored)")
    if isinstance(value, Exception):
        return Answer(None, describe(value))
    if isinstance(value, list | tuple) and value and all(_is_step(step) for step in value):
        return _read_steps(tuple((int(end), float(amount)) for end, amount in value))
    if not isinstance(value, numbers.Real):
        return Answer(None, f"TypeError: returned {_shown(value)} of type {type(value).__name__}; {RETURNS}")
    score = float(value)
    if not math.isfinite(score):
        return Answer(None, f"ValueError: returned {score}; a reward returns a finite number, or None when it cannot score")
    return Answer(score)


def _is_step(step: Any) -> bool:
    if not isinstance(step, list | tuple) or len(step) != 2:
        return False
    return isinstance(step[0], numbers.Integral) and not isinstance(step[0], bool) and isinstance(step[1], numbers.Real)


def _read_steps(steps: tuple[tuple[int, float], ...]) -> Answer:
    ends = [end for end, _ in steps]
    if ends[0] < 1 or any(a >= b for a, b in itertools.pairwise(ends)):
        return Answer(None, f"ValueError: returned steps that end at the characters {_shown(ends)}; ends are at least 1 and increase")
    if not math.isfinite(total := math.fsum(amount for _, amount in steps)):
        return Answer(None, f"ValueError: returned {_shown(steps)}; the rewards of steps and their sum are finite numbers")
    return Answer(total, steps=steps)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


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
    """The reward with the values of its reference. RefError for a value it does not take, or an argument nobody provides.

    A class is made with the values, and its object called as a function is.
    """
    if inspect.isclass(fn):
        fn, ref = _made(ref, fn), Ref(ref.path)
    check_signature(ref.path, fn, ref.values, PROVIDED)
    takes = [name for name in PROVIDED if name in parameters(fn)]
    if "rollouts" in takes and len(takes) > 1:
        raise RefError(f"{ref.path} takes {takes}; a reward takes rollout and task, or the rollouts of a step at once")
    try:
        inspect.signature(fn).bind(**dict.fromkeys(takes), **ref.values)
    except TypeError as error:
        raise RefError(f"{ref.path} cannot be called with {takes} by name: {error}") from error
    return Reward(fn, takes, ref.values)


def _made(ref: Ref, cls: type) -> Any:
    if not any("__call__" in vars(base) for base in cls.__mro__):
        raise RefError(f"{ref.path} is a class; a reward is a function of (rollout, task), or a class whose objects are called like one")
    check_signature(ref.path, cls, ref.values, ())
    try:
        return cls(**ref.values)
    except Exception as error:
        raise RefError(f"{ref.path}: {error if isinstance(error, ValueError) else describe(error)}") from error


class Reward:
    """A reward function with its values filled in, waiting for rollouts.

    Not functools.partial: which of rollout, task and rollouts are passed is known only here.
    """

    __slots__ = ("fn", "takes", "values")

    def __init__(self, fn: Callable[..., Any], takes: Iterable[str], values: Mapping[str, Any]) -> None:
        self.fn, self.takes, self.values = fn, tuple(takes), dict(values)

    @property
    def takes_many(self) -> bool:
        """It is called once for all rollouts, and returns one value each."""
        return "rollouts" in self.takes

    def load(self) -> Reward:
        """Let a reward that has something large to load, such as a model, do it now, by its method `load`."""
        if (load := getattr(self.fn, "load", None)) is not None:
            load()
        return self

    def __call__(self, rollouts: Sequence[Rollout]) -> Any:
        given = {"rollout": rollouts[0], "task": rollouts[0].task, "rollouts": rollouts}
        return self.fn(**{name: given[name] for name in self.takes}, **self.values)
