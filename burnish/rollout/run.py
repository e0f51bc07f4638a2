"""Episodes: the policy and the environment take turns, side by side for all samples of all tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from burnish.chat.template import encode_prompt, encode_reply
from burnish.config import Sampling
from burnish.engines.base import Completion, Engine, Request
from burnish.engines.native.sampler import stream_key
from burnish.envs.base import Env, Reply
from burnish.types import Group, Rollout, Scored, Task, Turn

Progress = Callable[[int, int], None]


class Scorer(Protocol):
    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]: ...


@dataclass(frozen=True, slots=True)
class Visit:
    """A task and how often it was visited before: its samples are numbered on, so no random number is used twice."""

    task: Task
    times_before: int = 0


@dataclass(slots=True)
class _Episode:
    task: Task
    sample: int
    stream: int
    env: Env | None = None
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logp_gen: list[float] = field(default_factory=list)
    knows_logp: bool = True
    turns: list[Turn] = field(default_factory=list)
    stop: str | None = None        # set when the episode has ended
    version: int | None = None

    def add(self, author: str, tokens: Sequence[int], logp: Sequence[float], text: str) -> None:
        start = len(self.tokens)
        self.tokens += tokens
        self.sampled += [author == "policy"] * len(tokens)
        self.logp_gen += logp
        self.turns.append(Turn(author, start, len(self.tokens), text))

    def frozen(self) -> Rollout:
        return Rollout(
            task=self.task, sample=self.sample, tokens=tuple(self.tokens), sampled=tuple(self.sampled),
            logp_gen=tuple(self.logp_gen) if self.knows_logp else (), turns=tuple(self.turns), stop=self.stop, version=self.version or 0,
        )


def run_groups(
    visits: Sequence[Visit],
    *,
    engine: Engine,
    tokenizer: Any,
    env: Callable[[], Env],
    scorer: Scorer,
    sampling: Sampling,
    samples_per_prompt: int,
    seed: int,
    purpose: str = "train",
    env_timeout_s: float = 60.0,
    clock: Any = None,
    progress: Progress | None = None,
) -> list[Group]:
    """All samples of all tasks, scored, one Group a visit in the order of the visits.

    A failure inside one episode (environment, template, reward) stays in that episode: its stop is error:<what>, its
    reward is None, and the others go on.
    """
    episodes = [
        _start(visit, n, env=env, tokenizer=tokenizer, seed=seed, purpose=purpose, samples=samples_per_prompt)
        for visit in visits
        for n in range(samples_per_prompt)
    ]
    with _Loop() as loop:
        while living := [e for e in episodes if e.stop is None]:
            requests = [Request(tuple(e.tokens), e.stream, sampling.max_new_tokens) for e in living]
            with _phase(clock, "generate"):
                completions = engine.generate(requests, sampling, progress=progress)
            with _phase(clock, "reward"):
                loop.run(_turns(living, completions, tokenizer, env_timeout_s))
    rollouts = [e.frozen() for e in episodes]
    with _phase(clock, "reward"):
        scored = _score(rollouts, scorer)
    return [
        Group(visit.task, tuple(scored[i * samples_per_prompt : (i + 1) * samples_per_prompt])) for i, visit in enumerate(visits)
    ]


def run_group(task: Task, **parts: Any) -> Group:
    """The samples of one task; the same arguments as run_groups."""
    return run_groups([Visit(task)], **parts)[0]


def _start(
    visit: Visit, n: int, *, env: Callable[[], Env], tokenizer: Any, seed: int, purpose: str, samples: int
) -> _Episode:
    sample = visit.times_before * samples + n
    episode = _Episode(visit.task, sample, stream_key(seed, visit.task.id, sample, purpose))
    try:
        episode.env = env()
        prompt = episode.env.start(visit.task)
        tokens = encode_prompt(tokenizer, prompt)
        text = prompt if isinstance(prompt, str) else tokenizer.decode(tokens)
        episode.add("prompt", tokens, [0.0] * len(tokens), text)
    except Exception as error:
        episode.stop = f"error:start: {type(error).__name__}: {error}"
    return episode


async def _turns(episodes: Sequence[_Episode], completions: Sequence[Completion], tokenizer: Any, timeout_s: float) -> None:
    await asyncio.gather(*(_turn(e, c, tokenizer, timeout_s) for e, c in zip(episodes, completions, strict=True)))


async def _turn(episode: _Episode, completion: Completion, tokenizer: Any, timeout_s: float) -> None:
    """Take in what the policy wrote, and let the environment answer."""
    if completion.stop == "error:prompt_too_long" and len(episode.turns) > 1:
        episode.stop = "context"                 # the environment's answer filled it
        return
    episode.knows_logp &= len(completion.logp_gen) == len(completion.tokens)
    episode.add("policy", completion.tokens, completion.logp_gen, completion.text)
    episode.version = completion.version if episode.version is None else min(episode.version, completion.version)
    if completion.stop.startswith("error:") or completion.stop == "context":
        episode.stop = completion.stop
        return
    try:
        reply: Reply = await asyncio.wait_for(episode.env.step(completion.text), timeout_s)
        if reply.text:
            tokens = encode_reply(tokenizer, reply.text)
            episode.add("env", tokens, [0.0] * len(tokens), reply.text)
        if reply.done:
            episode.stop = "env" if reply.text else completion.stop
    except TimeoutError:
        episode.stop = f"error:env: no reply within {timeout_s:g} s"
    except Exception as error:
        episode.stop = f"error:env: {type(error).__name__}: {error}"


class _Loop:
    """One event loop for all turns of all episodes, so that an environment may keep a connection.

    It runs in a thread of its own: the caller may have a loop running already, as a notebook does.
    """

    def __enter__(self) -> _Loop:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="burnish-env")
        self.runner = asyncio.Runner()
        return self

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.thread.submit(self.runner.run, work).result()

    def __exit__(self, *_: object) -> None:
        self.thread.submit(self.runner.close).result()
        self.thread.shutdown()


def _score(rollouts: Sequence[Rollout], scorer: Scorer) -> list[Scored]:
    whole = [r for r in rollouts if not r.stop.startswith("error:")]
    scored = iter(scorer.score(whole))
    return [
        Scored(r, None, {}, {"rollout": r.stop}) if r.stop.startswith("error:") else next(scored) for r in rollouts
    ]


class _NoClock:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _phase(clock: Any, name: str) -> Any:
    return clock.phase(name) if clock is not None else _NoClock()
