"""RewardPool: scores rollouts with all rewards of a run, in worker processes or in this one, and turns every failure into data."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from burnish.ref import RefError
from burnish.rewards.call import Answer, describe, stop_in_worker
from burnish.rewards.inline import Inline
from burnish.rewards.process import CHECK_S, Died, Process, Setting, Start
from burnish.rewards.steps import Decode, last_tokens
from burnish.rewards.wire import dump_line, dump_rollout
from burnish.types import Rollout, Scored

MAX_IN_FLIGHT = 32
IN_FLIGHT_S = 0.02
MIN_CALL_S = 1e-5


class Norm(Protocol):
    """Running statistics of one reward's scores, such as algorithms.running.RunningNorm."""

    def update(self, value: Tensor) -> None: ...

    def normalize(self, value: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """How scores become a reward. norms: by reward name; `learns`: their statistics take in the scores first.

    decode: the policy's tokens to their text; rewards of steps need it.
    """

    decode: Decode | None = None
    norms: Mapping[str, Norm] = field(default_factory=dict)
    learns: bool = False


PLAIN = Reading()


def reward_name(reward: Setting) -> str:
    """The key of scores, errors and metrics: the name that it was given, or the function's."""
    return reward.name or reward.fn.path.rpartition(":")[2]


class RewardPool:
    """Scores rollouts; a problem with one becomes `score None` with a reason, on that rollout only.

    rewards: config.Reward settings. Those with isolate=True run in `workers` child processes (POSIX), each of which calls one
        reward at a time and is killed, with everything it started, when a call outlives its time limit. The others run in this
        process: sync ones one after the other in a thread, async ones up to 32 at once. A thread cannot be killed: a call that
        hangs there is abandoned.
    start_timeout_s: how long a worker may take to import the rewards.
    memory_gib: memory a worker may allocate before a call fails with MemoryError; None: no limit.
    log: file for what isolated rewards print; None: this process's stderr.

    Raises RefError when a reward does not import or its values do not fit. Any thread may call `score`.
    """

    def __init__(
        self,
        rewards: Sequence[Setting],
        *,
        workers: int = 1,
        start_timeout_s: float = 120.0,
        memory_gib: float | None = 4.0,
        log: Path | None = None,
    ) -> None:
        stop_in_worker()
        self._rewards = tuple(rewards)
        self._names = [reward_name(r) for r in self._rewards]
        if not self._rewards:
            raise ValueError("a pool needs at least one reward")
        if workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        if twice := [name for name, count in Counter(self._names).items() if count > 1]:
            paths = [r.fn.path for r, name in zip(self._rewards, self._names, strict=True) if name == twice[0]]
            raise RefError(f"two rewards are called {twice[0]!r}: {paths}; scores are kept by name, so give one a name")
        self._isolated = [i for i, r in enumerate(self._rewards) if r.isolate]
        self._inline = {i: Inline(r.fn, timeout_s=r.timeout_s) for i, r in enumerate(self._rewards) if not r.isolate}
        self._queue, self._drivers = _Queue(), []
        self._close = weakref.finalize(self, _shut_down, self._queue, self._drivers, list(self._inline.values()))
        if self._isolated:
            isolated = [self._rewards[i] for i in self._isolated]
            start = Start.of(isolated, timeout_s=start_timeout_s, memory_gib=memory_gib, log=log)
            self._start_workers(start, workers, [r.timeout_s for r in isolated])

    def score(self, rollouts: Sequence[Rollout], reading: Reading = PLAIN) -> list[Scored]:
        """One Scored a rollout, in their order. Returns when all are scored or have failed."""
        if not self._close.alive:
            raise RuntimeError("the reward pool is closed")
        jobs: list[_Job] = []
        if self._isolated:
            latch = _Latch(len(rollouts))
            jobs = [_Job(rollout, len(self._isolated), latch) for rollout in rollouts]
            self._queue.put(jobs)
        calls = {i: inline.submit(rollouts) for i, inline in self._inline.items()}
        answers = {i: self._inline[i].collect(c) for i, c in calls.items()}
        if jobs:
            latch.wait()
            answers |= {reward: [job.answers[place] for job in jobs] for place, reward in enumerate(self._isolated)}
        values = [_normalized(answers[i], reading.norms.get(name), learns=reading.learns) for i, name in enumerate(self._names)]
        return [
            self._scored(rollout, [answers[i][n] for i in range(len(values))], [column[n] for column in values], reading.decode)
            for n, rollout in enumerate(rollouts)
        ]

    def close(self) -> None:
        """Kill the workers; calls in progress end as not scored. Safe to call twice. Also done when the pool is collected."""
        self._close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scored(self, rollout: Rollout, answers: Sequence[Answer], values: Sequence[Answer], decode: Decode | None) -> Scored:
        """`values` are the answers as they are weighed, `answers` as they were given."""
        scores = {name: answer.score for name, answer in zip(self._names, answers, strict=True)}
        errors = {name: value.error for name, value in zip(self._names, values, strict=True) if value.error is not None}
        if errors:
            return Scored(rollout, None, scores, errors)
        weighed = [(r.cost, r.weight * value.score) for r, value in zip(self._rewards, values, strict=True)]
        reward, cost = (math.fsum(value for is_cost, value in weighed if is_cost is kind) for kind in (False, True))
        for what, value in (("reward", reward), ("cost", cost)):
            if not math.isfinite(value):
                return Scored(rollout, None, scores, {what: f"OverflowError: the weighted sum of {scores} is {value}"})
        try:
            steps = self._steps(rollout, values, decode)
        except ValueError as error:
            return Scored(rollout, None, scores, {"steps": f"ValueError: {error}"})
        given = None
        if any(value is not answer for value, answer in zip(values, answers, strict=True)):
            given = math.fsum(r.weight * answer.score for r, answer in zip(self._rewards, answers, strict=True) if not r.cost)
        cost = float(cost) if any(r.cost for r in self._rewards) else None
        return Scored(rollout, float(reward), scores, cost=cost, given=given, steps=steps)

    def _steps(self, rollout: Rollout, values: Sequence[Answer], decode: Decode | None) -> tuple[tuple[int, float], ...]:
        """Rewards of steps, by the step's last token. Beside them a reward of the whole rollout stands at its last sampled token."""
        parts = [(r.weight, value) for r, value in zip(self._rewards, values, strict=True) if not r.cost]
        if not any(value.steps for _, value in parts):
            return ()
        if decode is None:
            raise ValueError("a reward gave rewards of steps, and nobody said how the policy's tokens decode (Reading.decode)")
        last = max((at for at, sampled in enumerate(rollout.sampled) if sampled), default=-1)
        at_token: dict[int, float] = {}
        for weight, value in parts:
            ends = last_tokens(rollout, [end for end, _ in value.steps], decode) if value.steps else [last]
            amounts = [amount for _, amount in value.steps] if value.steps else [value.score]
            for at, amount in zip(ends, amounts, strict=True):
                at_token[at] = at_token.get(at, 0.0) + weight * amount
        return tuple(sorted(at_token.items()))

    def _start_workers(self, start: Start, workers: int, limits_s: Sequence[float]) -> None:
        self._drivers += [_Driver(self._queue, start, limits_s) for _ in range(workers)]
        for driver in self._drivers:
            driver.start()
        for driver in self._drivers:
            driver.started.wait()
        if failed := next((d.failed for d in self._drivers if d.failed is not None), None):
            self.close()
            raise failed


def _normalized(answers: Sequence[Answer], norm: Norm | None, *, learns: bool) -> list[Answer]:
    if norm is None:
        return list(answers)
    if any(answer.steps for answer in answers):
        text = "ValueError: the reward gave rewards of steps, which are not normalised; remove `normalize` from it"
        return [Answer(None, text) if answer.steps else answer for answer in answers]
    known = torch.tensor([answer.score for answer in answers if answer.score is not None], dtype=torch.float64)
    if learns:
        norm.update(known)
    scores = iter(norm.normalize(known).tolist())
    return [answer if answer.score is None else Answer(next(scores)) for answer in answers]


class _Latch:
    """Opens when `count` jobs are done."""

    def __init__(self, count: int) -> None:
        self._left, self._lock, self._open = count, threading.Lock(), threading.Event()
        if count == 0:
            self._open.set()

    def count_down(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._open.set()

    def wait(self) -> None:
        self._open.wait()


class _Job:
    """One rollout on its way through the isolated rewards."""

    __slots__ = ("answers", "id", "latch", "lost", "rollout", "todo")

    def __init__(self, rollout: Rollout, num_rewards: int, latch: _Latch) -> None:
        self.rollout, self.latch = rollout, latch
        self.answers: dict[int, Answer] = {}
        self.todo = list(range(num_rewards))
        self.lost = 0              # workers that died on it outside of a call
        self.id = -1

    def answer(self, index: int, answer: Answer) -> None:
        self.answers[index] = answer
        self.todo.remove(index)
        if not self.todo:
            self.latch.count_down()

    def fail(self, reason: str) -> None:
        for index in tuple(self.todo):
            self.answer(index, Answer(None, reason))


class _Queue:
    """Jobs that no worker has taken yet."""

    def __init__(self) -> None:
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self.closed = False

    def put(self, jobs: Sequence[_Job]) -> None:
        with self._changed:
            if not self.closed:
                self._jobs.extend(jobs)
                self._changed.notify_all()
                return
        for job in jobs:
            job.fail("RuntimeError: the reward pool was closed")

    def take(self, *, wait: bool) -> _Job | None:
        """The next job; None when there is none (without wait) or the pool closes (with it)."""
        with self._changed:
            while wait and not self._jobs and not self.closed:
                self._changed.wait()
            return self._jobs.popleft() if self._jobs else None

    def close(self) -> None:
        with self._changed:
            self.closed = True
            jobs, self._jobs = self._jobs, deque()
            self._changed.notify_all()
        for job in jobs:
            job.fail("RuntimeError: the reward pool was closed")


class _Driver(threading.Thread):
    """Owns one worker process: feeds it, times its calls, replaces it when it dies.

    A few rollouts are in flight so that cheap calls do not wait for the pipe. The child takes them in order, so the time of a
    call runs from its start message, or from the answer before it, whichever is later.
    """

    def __init__(self, queue: _Queue, start: Start, limits_s: Sequence[float]) -> None:
        super().__init__(name="burnish-reward-worker", daemon=True)
        self._queue, self._start, self._limits_s = queue, start, limits_s
        self._process: Process | None = None
        self._flight: deque[_Job] = deque()
        self._running: int | None = None
        self._since = 0.0
        self._call_s = IN_FLIGHT_S
        self._next_id = 0
        self.started = threading.Event()
        self.failed: BaseException | None = None

    def run(self) -> None:
        try:
            self._process = Process(self._start)
        except BaseException as error:
            self.failed = error
            return
        finally:
            self.started.set()
        while not self._queue.closed:
            try:
                if self._process is None:
                    self._restart()
                self._feed()
                if self._flight and self._process is not None:
                    self._step()
            except Died as died:
                self._lose(f"RuntimeError: the worker process died in this call: {died}", started=self._running is not None)
            except BaseException as error:  # nobody else would answer the jobs
                if not self._flight and (job := self._queue.take(wait=False)) is not None:
                    self._flight.append(job)   # should this come again, each round still answers one
                self._drop(f"RuntimeError: the reward pool failed: {describe(error)}")
        self._drop("RuntimeError: the reward pool was closed")

    def _feed(self) -> None:
        depth = max(1, min(MAX_IN_FLIGHT, int(IN_FLIGHT_S / self._call_s)))
        while len(self._flight) < depth:
            job = self._queue.take(wait=not self._flight)
            if job is None:
                return
            self._send(job)

    def _send(self, job: _Job) -> None:
        """Queue the job at the child. One whose data cannot travel is answered here."""
        self._next_id += 1
        job.id = self._next_id
        try:
            line = dump_line({"id": job.id, "do": job.todo, "rollout": dump_rollout(job.rollout)})
        except Exception as error:
            job.fail(f"{describe(error)}: a task's answer and info must be plain JSON to reach a worker process; or set isolate: false")
            return
        if not self._flight:
            self._since, self._running = time.monotonic(), None
        self._flight.append(job)
        self._process.send(line)

    def _step(self) -> None:
        """Wait for news of the call in progress, at most until its time is up."""
        head = self._flight[0]
        index = head.todo[0]
        deadline = self._since + self._limits_s[index]
        messages = self._process.receive(min(deadline - time.monotonic(), CHECK_S))
        now = time.monotonic()
        for message in messages:
            self._read(message, now)
        if not messages and now >= deadline:
            self._lose(f"TimeoutError: no answer within {self._limits_s[index]:g} s; the call was stopped", started=True)

    def _read(self, message: list, now: float) -> None:
        head = self._flight[0]
        if message[:2] != [head.id, head.todo[0]]:
            raise Died(f"it answered {message[:2]} where {[head.id, head.todo[0]]} was asked")
        if len(message) == 2:
            self._running = message[1]
        else:
            self._running = None
            self._call_s = max(MIN_CALL_S, 0.9 * self._call_s + 0.1 * (now - self._since))   # answers may arrive in the same read
            head.answer(message[1], Answer(message[2], message[3], tuple((end, amount) for end, amount in message[4])))
            if not head.todo:
                self._flight.popleft()
        self._since = now

    def _lose(self, reason: str, *, started: bool) -> None:
        """The child hangs or is dead. The call it was in gets the blame; all others are done again by the next child."""
        self._stop()
        self._call_s = IN_FLIGHT_S
        if not self._flight:
            return
        head = self._flight[0]
        head.lost += not started
        if started or head.lost > 1:
            head.answer(head.todo[0], Answer(None, reason))
            if not head.todo:
                self._flight.popleft()

    def _restart(self) -> None:
        try:
            self._process = Process(self._start)
        except Exception as error:
            self._drop(f"RuntimeError: the worker process could not be started again: {describe(error)}")
            if job := self._queue.take(wait=True):
                self._flight.append(job)
            return
        again, self._flight = self._flight, deque()
        for job in again:
            self._send(job)

    def _drop(self, reason: str) -> None:
        self._stop()
        while self._flight:
            self._flight.popleft().fail(reason)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._process, self._running = None, None


def _shut_down(queue: _Queue, drivers: Sequence[_Driver], inline: Sequence[Inline]) -> None:
    queue.close()
    for place in inline:
        place.close()
    for driver in drivers:
        if driver is not threading.current_thread():  # the garbage collector may run this in any thread
            driver.join()
