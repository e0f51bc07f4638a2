"""Several engines as one: a conversation stays where its history is cached, the others go where least waits, and the dead are left out."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from burnish.config import Sampling
from burnish.engines.base import Abilities, Completion, Engine, EngineError, Request, check_sampling

SESSIONS_KEPT = 100_000
Progress = Callable[[int, int], None]


@dataclass(slots=True, eq=False)
class Member:
    """An engine of a pool. `why` says why it is out, and is None while it is in; stale: it did not take the last weights; busy: a call to
    it runs.
    """

    name: str
    engine: Engine
    why: str | None = None
    out_since: float = 0.0
    stale: bool = False
    busy: bool = False


class EnginePool:
    """The engines hold the same weights: those of one version when the pool is made, and those of the pool's last `load` from then on.

    A request that an engine answers with error:server goes to another. An engine that raises, or answers nothing but that, is taken out; it
    is tried again retry_after_s later, and at once where no other is left. One that did not take new weights is out until it takes later
    ones. timeout_s: an engine that has not answered by then is out until its call ends, and what it then says is thrown away; none: it is
    waited for.
    """

    def __init__(self, engines: Sequence[Engine], *, retry_after_s: float = 60.0, timeout_s: float | None = None) -> None:
        if not engines:
            raise EngineError("a pool needs at least one engine")
        if len({id(e) for e in engines}) < len(engines):
            raise EngineError("an engine stands twice in the pool; each is called from a thread of its own, so give each once")
        if len(versions := {e.version for e in engines}) > 1:
            raise EngineError(f"the engines of a pool hold weights of versions {sorted(versions)}; they must be of one")
        self.members = [Member(f"{i} ({type(e).__name__})", e) for i, e in enumerate(engines)]
        self.abilities = meet([e.abilities for e in engines])
        self.version = versions.pop()
        self.retry_after_s, self.timeout_s = retry_after_s, timeout_s
        self._home: OrderedDict[str, Member] = OrderedDict()
        self._one_at_a_time = threading.Lock()

    @property
    def out(self) -> dict[str, str]:
        """The engines that are out, and why."""
        return {m.name: m.why for m in self.members if m.why is not None}

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, progress: Progress | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests; see Engine. Raises EngineError with all causes where no engine is left.

        A request keeps its error:server where every engine has failed it and others were answered.
        """
        check_sampling(self.abilities, sampling, name="pool's")
        with self._one_at_a_time:
            return self._generate(requests, sampling, progress)

    def _generate(self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None) -> list[Completion]:
        done: dict[int, Completion] = {}
        failures: dict[int, dict[str, Completion]] = {}      # of a request, by the engine that failed it
        causes: dict[str, str] = {}                          # of the engines that this call took out
        while True:
            able = self._able(causes)
            waiting = {i: left for i in range(len(requests)) if i not in done and (left := _left(able, failures.get(i, {})))}
            if not waiting:
                break
            shares = self._shares(waiting, requests)
            jobs = [(m, partial(_generate, m.engine, [requests[i] for i in ids], sampling)) for m, ids in shares]
            before = len(done)
            tell = None if progress is None else lambda n, before=before: progress(before + n, len(requests))
            for (member, ids), result in zip(shares, self._side_by_side(jobs, tell, self.timeout_s), strict=True):
                if isinstance(result, Exception):
                    causes[member.name] = self._take_out(member, f"{type(result).__name__}: {result}")
                    continue
                for i, completion in zip(ids, result, strict=True):
                    if completion.stop.startswith("error:server"):
                        failures.setdefault(i, {})[member.name] = completion
                    else:
                        done[i] = completion
                if any(i in done for i in ids):
                    member.why = None
                else:
                    causes[member.name] = self._take_out(member, result[0].stop)
        lost = [i for i in range(len(requests)) if i not in done]
        if lost and (not done or any(i not in failures for i in lost)):
            raise EngineError(f"no engine of the pool is left: {_listed(self.out | causes)}")
        return [done[i] if i in done else list(failures[i].values())[-1] for i in range(len(requests))]

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """To all engines, those that are out too; `weights` are gathered once. Raises EngineError where none took them."""
        with self._one_at_a_time:
            takers = [m for m in self.members if not m.engine.abilities.shares_weights]
            if weights is not None and len(takers) > 1:
                weights = list(weights)
            free = [m for m in self.members if not m.busy]
            jobs = [(m, partial(_load, m.engine, version, weights if m in takers else None)) for m in free]
            results = dict(zip((m.name for m in free), self._side_by_side(jobs, None, None), strict=True))
            self.version = version
            for member in self.members:
                error = results.get(member.name, EngineError("an earlier call to it has not ended"))
                member.stale = isinstance(error, Exception)
                if member.stale:
                    self._take_out(member, f"load of version {version}: {type(error).__name__}: {error}")
                else:
                    member.why = None
            if all(m.stale for m in self.members):
                raise EngineError(f"no engine of the pool took version {version} of the weights: {_listed(self.out)}")

    def close(self) -> None:
        """Closes all; the first error is raised when all were asked."""
        errors = []
        for member in self.members:
            try:
                member.engine.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _able(self, causes: dict[str, str]) -> list[Member]:
        """The engines to ask now: those that are in or whose time out is over; where none is, all that have not failed in this call."""
        fit = [m for m in self.members if not m.busy and not m.stale and m.engine.version == self.version and m.name not in causes]
        now = time.monotonic()
        return [m for m in fit if m.why is None or now - m.out_since >= self.retry_after_s] or fit

    def _shares(self, waiting: dict[int, list[Member]], requests: Sequence[Request]) -> list[tuple[Member, list[int]]]:
        """Who continues which requests: each of `waiting` may go to the members that stand with it."""
        shares: dict[str, tuple[Member, list[int]]] = {}
        tokens: Counter[str] = Counter()

        def home(i: int) -> Member | None:
            session = requests[i].session
            return self._home.get(session) if session is not None else None

        for i in sorted(waiting, key=lambda i: home(i) not in waiting[i]):     # those with a home first: their places are taken
            member = home(i)
            if member not in waiting[i]:
                member = min(waiting[i], key=lambda m: tokens[m.name])
            if (session := requests[i].session) is not None:
                self._home[session] = member
                self._home.move_to_end(session)
            shares.setdefault(member.name, (member, []))[1].append(i)
            tokens[member.name] += len(requests[i].tokens) + requests[i].max_new_tokens
        while len(self._home) > SESSIONS_KEPT:
            self._home.popitem(last=False)
        return [(member, sorted(ids)) for member, ids in shares.values()]

    def _take_out(self, member: Member, why: str) -> str:
        member.why, member.out_since = why, time.monotonic()
        return why

    def _side_by_side(
        self, jobs: Sequence[tuple[Member, Callable[[Any], Any]]], tell: Callable[[int], None] | None, timeout_s: float | None
    ) -> list[Any]:
        """What each job gave, or the exception it ended with. Progress is told in the caller's thread."""
        news: queue.SimpleQueue[tuple[int, bool, Any]] = queue.SimpleQueue()

        def work(k: int, member: Member, job: Callable[[Any], Any]) -> None:
            try:
                result: Any = job(None if tell is None else lambda n, _: news.put((k, False, n)))
            except BaseException as error:
                result = error if isinstance(error, Exception) else EngineError(f"{type(error).__name__}: {error}")
            member.busy = False
            news.put((k, True, result))

        for k, (member, job) in enumerate(jobs):
            member.busy = True
            threading.Thread(target=work, args=(k, member, job), name=f"burnish-pool-{k}", daemon=True).start()
        results: dict[int, Any] = {}
        counts = [0] * len(jobs)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while len(results) < len(jobs):
            try:
                k, ended, value = news.get(timeout=None if end is None else max(end - time.monotonic(), 0.001))
            except queue.Empty:
                break
            if ended:
                results[k] = value
            elif tell is not None:
                counts[k] = value
                tell(sum(counts))
        return [results.get(k, EngineError(f"no answer within {timeout_s} s")) for k in range(len(jobs))]


def meet(abilities: Sequence[Abilities]) -> Abilities:
    """What all of them can do. A pool takes no requests while others run."""
    def every(name: str) -> bool:
        return all(getattr(a, name) for a in abilities)

    return Abilities(
        logprobs=every("logprobs"), shares_weights=every("shares_weights"), token_ids=every("token_ids"), streams=every("streams"),
        publish=every("publish"), live=False, sampling=frozenset.intersection(*(a.sampling for a in abilities)),
    )


def _left(able: Sequence[Member], failures: dict[str, Completion]) -> list[Member]:
    return [m for m in able if m.name not in failures]


def _generate(engine: Engine, requests: list[Request], sampling: Sampling, progress: Progress | None) -> list[Completion]:
    done = engine.generate(requests, sampling, progress=progress)
    if not isinstance(done, list) or len(done) != len(requests) or not all(isinstance(c, Completion) for c in done):
        raise EngineError(f"gave {len(done) if isinstance(done, list) else type(done).__name__} completions for {len(requests)} requests")
    return done


def _load(engine: Engine, version: int, weights: Iterable[tuple[str, Tensor]] | None, _: None) -> None:
    if weights is None:
        engine.load(version)
    else:
        engine.load(version, weights)
    if engine.version != version:
        raise EngineError(f"its weights are of version {engine.version}")


def _listed(causes: dict[str, str]) -> str:
    return "; ".join(f"engine {name}: {why}" for name, why in causes.items())
