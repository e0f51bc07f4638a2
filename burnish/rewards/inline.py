"""Rewards with isolate=False: called in this process, in threads of their own, under the same time limit."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from typing import Any

from burnish.ref import Ref, RefError
from burnish.rewards.call import Answer, bind, call, describe
from burnish.types import Rollout

ASYNC_AT_ONCE = 32
CHECK_S = 0.05


class _Call:
    __slots__ = ("answers", "done", "rollouts", "started", "waiting")

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = rollouts
        self.started: float | None = None
        self.waiting: Future | None = None     # of an async reward
        self.answers: list[Answer] | None = None
        self.done = threading.Event()


class Inline:
    """One reward in this process. A sync one is called by one thread, an async one by up to 32 that share one event loop.
    One that takes many rollouts is called once for all of them, with as much time as single calls would have.

    A call that outlives the limit is reported and its thread left alone, for a thread cannot be killed; another takes its place.
    One that holds the interpreter's lock (a regular expression that explodes) stops the whole process: isolate=True is for those.
    """

    def __init__(self, ref: Ref, *, timeout_s: float) -> None:
        self._reward = bind(ref)
        try:
            self._reward.load()
        except Exception as error:
            raise RefError(f"{ref.path}: {error if isinstance(error, ValueError) else describe(error)}") from error
        self._timeout_s = timeout_s
        fn = self._reward.fn
        is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
        self._num_threads = ASYNC_AT_ONCE if is_async else 1
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, rollouts: Sequence[Rollout]) -> list[_Call]:
        calls = [_Call([rollout]) for rollout in rollouts]
        if self._reward.takes_many:
            calls = [_Call(rollouts)] if rollouts else []
        with self._lock:
            missing = min(self._num_threads, len(calls)) - self._threads
        for _ in range(missing):
            self._start_thread()
        for one in calls:
            self._calls.put(one)
        return calls

    def collect(self, calls: Sequence[_Call]) -> list[Answer]:
        """Their answers, in order. Calls are taken in order, so the first that is not done is the first whose time runs out."""
        for one in calls:
            while not one.done.is_set():
                if one.started is None:
                    one.done.wait(CHECK_S)
                    continue
                left_s = one.started + self._timeout_s * len(one.rollouts) - time.monotonic()
                if left_s <= 0 or not one.done.wait(left_s):
                    self._abandon(one)
        return [answer for one in calls for answer in one.answers]

    def close(self) -> None:
        with self._lock:
            for _ in range(self._threads):
                self._calls.put(None)
            self._threads = 0
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def _start_thread(self) -> None:
        with self._lock:
            self._threads += 1
        threading.Thread(target=self._run, name="burnish-reward", daemon=True).start()

    def _run(self) -> None:
        while (one := self._calls.get()) is not None:
            one.started = time.monotonic()
            answers = call(self._reward, one.rollouts, lambda awaitable, one=one: self._wait(awaitable, one))
            with self._lock:
                if one.answers is not None:  # abandoned: another thread is at work already
                    return
                one.answers = answers
            one.done.set()

    def _wait(self, awaitable: Awaitable[Any], one: _Call) -> Any:
        async def finish() -> Any:
            return await awaitable

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="burnish-reward-loop", daemon=True).start()
            one.waiting = asyncio.run_coroutine_threadsafe(finish(), self._loop)
        return one.waiting.result()

    def _abandon(self, one: _Call) -> None:
        with self._lock:
            if one.answers is not None:
                return
            limit_s = self._timeout_s * len(one.rollouts)
            text = f"TimeoutError: no answer within {limit_s:g} s; the call was abandoned in its thread"
            one.answers = [Answer(None, text)] * len(one.rollouts)
            self._threads -= 1
            loop = self._loop
        one.done.set()
        self._start_thread()
        if one.waiting is not None:
            one.waiting.cancel()
            self._replace_if_stuck(loop)

    def _replace_if_stuck(self, loop: asyncio.AbstractEventLoop) -> None:
        """An async reward that never awaits blocks its event loop for all later calls: they get a new one."""
        alive = threading.Event()
        loop.call_soon_threadsafe(alive.set)
        if not alive.wait(self._timeout_s):
            with self._lock:
                if self._loop is loop:
                    self._loop = None
