"""The policy as a sampler: continuous batching over pages, prompts shared, weights taken over between two steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from burnish.chat.template import by_ids
from burnish.config import Sampling
from burnish.engines.base import Abilities, Completion, EngineError, Request
from burnish.engines.native.build import NotBuilt
from burnish.engines.native.drafts import Lookup, Payoff
from burnish.engines.native.fast import FastRunner, Unsuited
from burnish.engines.native.guide import Guide, GuideError, GuideState, allow_all
from burnish.engines.native.pages import PAGE_TOKENS
from burnish.engines.native.sampler import uniforms
from burnish.engines.native.scheduler import Rows, Scheduler, Writing
from burnish.engines.native.stops import Stops
from burnish.engines.native.torch_runner import TorchRunner
from burnish.models.logprobs import Adjustment
from burnish.models.policy import Policy


class NativeEngine:
    """Samples with the trainer's model.

    slots: sequences that write side by side; a finished one's slot is refilled at once. rows_per_step: tokens that go through the model
    in one step beside guesses, the newest of each sequence and chunks of prompts together. cache_tokens: size of the cache, beyond which
    requests wait; none: as much as the slots can need. compiled: none takes the compiled step where the machine and the model allow, True
    insists, False does without. batch_invariant: a sequence is the same to the last bit whatever runs beside it; False lets the torch step
    read prompts in chunks and reuse prefixes of earlier requests, which the compiled step does either way. drafts: guess tokens from the
    sequence itself (prompt lookup) when it pays ("auto", the compiled step only), always, or never. new_weights: sequences that run while
    weights change "continue", or "read_again" what they have under the new ones.
    """

    abilities = Abilities(logprobs=True, shares_weights=True)

    def __init__(
        self, policy: Policy, tokenizer: Any, *, context_tokens: int, slots: int = 64, rows_per_step: int = 256,
        cache_tokens: int | None = None, compiled: bool | None = None, batch_invariant: bool = True,
        drafts: Literal["auto", "always", "never"] = "auto", new_weights: Literal["continue", "read_again"] = "continue",
    ) -> None:
        self.check_values(
            slots=slots, rows_per_step=rows_per_step, cache_tokens=cache_tokens, compiled=compiled, batch_invariant=batch_invariant,
            drafts=drafts, new_weights=new_weights,
        )
        self.policy, self.tokenizer, self.context_tokens = policy, tokenizer, context_tokens
        self.slots, self.rows_per_step, self.cache_tokens = slots, rows_per_step, cache_tokens
        self.batch_invariant, self.new_weights = batch_invariant, new_weights
        self.vocab_size = policy.config.get_text_config().vocab_size
        self.version = 0
        self.why_not_compiled: str | None = None
        self.runner = self._make_runner(compiled)
        if drafts == "always" and batch_invariant and not self.runner.row_exact:
            raise EngineError(
                "engine.drafts: always changes the last bits of the torch step's numbers, so it does not go with batch_invariant: true; "
                f"use drafts: never, or batch_invariant: false (not compiled: {self.why_not_compiled or 'as asked'})"
            )
        self.drafts = drafts != "never" and (drafts == "always" or self.runner.row_exact)
        self.payoff = Payoff() if drafts == "auto" else None
        self.stale = False
        self.seen_weights = self._mark()
        self.scheduler: Scheduler | None = None
        self.open: Stream | None = None
        self.lock = threading.RLock()
        self.rules: dict[int, tuple[Sampling, _Rules]] = {}

    @staticmethod
    def check_values(**values: Any) -> None:
        """Raises EngineError for a value that no engine of this kind takes; needs no model."""
        choices = {
            "drafts": ("auto", "always", "never"), "new_weights": ("continue", "read_again"), "compiled": (None, True, False),
            "batch_invariant": (True, False),
        }
        for name, value in values.items():
            known = choices.get(name)
            if known is not None and not any(value is k or (isinstance(k, str) and value == k) for k in known):
                names = ", ".join("null" if k is None else str(k).lower() for k in known)
                raise EngineError(f"engine.{name} is one of {names}; found {value!r}")
            if known is None and not (name == "cache_tokens" and value is None) and (type(value) is not int or value < 1):
                raise EngineError(f"engine.{name} is a whole number from 1 on; found {value!r}")

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """The weights are those of `version` from the next step on. Prefixes of earlier versions are forgotten. `weights` are copied
        into the module, between two steps; without them they are there already. Raises EngineError, with nothing changed, where names
        or shapes are not the module's.
        """
        with self.lock:
            if weights is not None:
                self._copy(dict(weights))
            if weights is not None or version != self.version:
                self.version, self.stale = version, True
                if self.open is not None and self.open.live:
                    self._refresh()

    def close(self) -> None:
        """The cache is given back. The engine can be used again."""
        with self.lock:
            self.scheduler = self.open = None
            self.runner.release()

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests; see Engine."""
        with self.stream(requests) as stream:
            ids = [stream.submit(request, sampling) for request in requests]
            done: dict[int, Completion] = {}
            while len(done) < len(ids):
                done |= dict(stream.advance())
                if progress:
                    progress(len(done), len(ids))
        return [done[i] for i in ids]

    def rules_of(self, sampling: Sampling) -> _Rules:
        """Made once for each object, since a guide takes a while."""
        key = id(sampling)
        if key not in self.rules:
            if len(self.rules) > 256:
                self.rules.clear()
            self.rules[key] = sampling, _Rules(self, sampling)      # the object is held, so that its id stays its own
        return self.rules[key][1]

    def stream(self, expected: Sequence[Request] = ()) -> Stream:
        """Requests that come and go: submit, cancel, advance. `expected` sizes the cache where cache_tokens does not. One at a time."""
        if self.open is not None and self.open.live:
            raise EngineError("a stream of this engine is open and has requests that run; submit to it, or leave it first")
        longest = max((len(r.tokens) + r.max_new_tokens for r in expected), default=self.context_tokens)
        slots = max(min(self.slots, len(expected) or self.slots), 1)
        num_pages = self.cache_tokens // PAGE_TOKENS if self.cache_tokens else slots * -(-min(longest, self.context_tokens) // PAGE_TOKENS)
        self._reserve(slots=slots, num_pages=max(num_pages, 1))
        self._look_for_changes()
        self.open = Stream(self)
        return self.open

    def _reserve(self, *, slots: int, num_pages: int) -> None:
        have = self.scheduler
        if have is not None:
            slots, num_pages = max(slots, have.slots), max(num_pages, have.pages.num_pages)
        if have is None or slots > have.slots or num_pages > have.pages.num_pages:
            self.runner.reserve(num_pages=num_pages, rows=slots + 2 * self.rows_per_step + PAGE_TOKENS)
        if have is not None:
            have.grow(slots=slots, num_pages=num_pages)
            return
        self.scheduler = Scheduler(
            slots=slots, num_pages=num_pages, pages_per_slot=-(-self.context_tokens // PAGE_TOKENS), rows_per_step=self.rows_per_step,
            copy_page=self.runner.copy_page, clear_page=self.runner.clear_page,
            whole_prompts=self.batch_invariant and not self.runner.row_exact,
        )

    def _make_runner(self, compiled: bool | None) -> FastRunner | TorchRunner:
        if compiled is not False:
            try:
                return FastRunner(self.policy, context_tokens=self.context_tokens)
            except (NotBuilt, Unsuited) as error:
                if compiled:
                    raise EngineError(f"engine.compiled is true, but {error}; leave it out for the torch step") from error
                self.why_not_compiled = str(error)
        return TorchRunner(self.policy, batch_invariant=self.batch_invariant)

    def _look_for_changes(self) -> None:
        """Weights that were changed without a word are the weights all the same."""
        if self.stale or self._mark() != self.seen_weights:
            self._refresh()

    def _refresh(self) -> None:
        self.runner.refresh()
        self.seen_weights = self._mark()
        self.stale = False
        if self.scheduler is not None:
            self.scheduler.new_weights(read_again=self.new_weights == "read_again")

    def _mark(self) -> tuple[int, int]:
        """Changes whenever a parameter is written to, or another one stands in its place."""
        count, where = 0, 0
        for p in self.policy.module.parameters():
            count += p._version
            where ^= id(p)
        return count, where

    @torch.no_grad()
    def _copy(self, weights: dict[str, Tensor]) -> None:
        own = self.policy.module.state_dict()
        tied = {name for name, tensor in own.items() if any(tensor is not t and tensor.data_ptr() == t.data_ptr() for t in own.values())}
        missing, unknown = sorted(own.keys() - weights.keys() - tied), sorted(weights.keys() - own.keys())
        if missing or unknown:
            raise EngineError(f"the weights do not fit the engine's model: {f'no {missing[0]}' if missing else f'{unknown[0]} is unknown'}")
        for name, tensor in weights.items():
            if tensor.shape != own[name].shape:
                raise EngineError(f"the weights do not fit the engine's model: {name} is {list(tensor.shape)}, not {list(own[name].shape)}")
        for name, tensor in weights.items():
            own[name].copy_(tensor)


class _Rules:
    """What one Sampling asks for, made ready."""

    def __init__(self, engine: NativeEngine, sampling: Sampling) -> None:
        self.sampling = by_ids(sampling, engine.tokenizer)
        ends = self.sampling.end_tokens
        self.stops = Stops(engine.tokenizer, end_token_ids=ends, stop=sampling.stop, min_new_tokens=sampling.min_new_tokens)
        self.adjustment = Adjustment.of(self.sampling)
        self.guide = None
        if sampling.guide is not None:
            kind = sampling.guide.model_dump(exclude_none=True)
            self.guide = Guide(engine.tokenizer, vocab_size=engine.vocab_size, end_token_ids=ends, **kind)


class Stream:
    """Requests on an engine. `advance` makes one step and gives what has ended in it; leaving it cancels what still runs."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.live: dict[int, Writing] = {}
        self.ready: deque[tuple[int, Completion]] = deque()
        self.next_id = 0
        self.num_steps = self.num_prompt_rows = self.num_guessed = self.num_stood = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if self.engine.open is self:
            for id_ in list(self.live):
                self.cancel(id_)

    def submit(self, request: Request, sampling: Sampling) -> int:
        """The id by which `advance` and `cancel` speak of it. One that cannot run ends as error:<what> at the next advance."""
        with self.engine.lock:
            self._check_open()
            id_, self.next_id = self.next_id, self.next_id + 1
            room = self.engine.context_tokens - len(request.tokens)
            s = Writing(id_, request, min(request.max_new_tokens, room), list(request.tokens))
            what = None
            if not request.tokens:
                what = "empty_prompt"
            elif not 0 <= min(request.tokens) <= max(request.tokens) < self.engine.vocab_size:
                what = "unknown_token"
            elif not 0 <= request.stream < 2**64:
                what = "stream_beyond_64_bits"
            elif room < 1:
                what = "prompt_too_long"
            elif s.limit < 1:
                what = "no_tokens_asked"
            elif not self.engine.scheduler.fits(s):
                what = "no_room_in_cache"
            if what is not None:
                self.ready.append((id_, Completion((), (), "", f"error:{what}", self.engine.version)))
                return id_
            s.rules = self.engine.rules_of(sampling)
            s.guide = s.rules.guide.start() if s.rules.guide else None
            s.lookup = Lookup() if self.engine.drafts else None
            self.live[id_] = s
            self.engine.scheduler.submit(s)
            return id_

    def cancel(self, id_: int) -> Completion | None:
        """Take a request out and give what it has written; None for one that has ended."""
        with self.engine.lock:
            if (s := self.live.pop(id_, None)) is None:
                return None
            self.engine.scheduler.cancel(s)
            return self._completion(s, "cancelled")

    def so_far(self, id_: int) -> Completion | None:
        """What a request that runs has written up to now, stop "running"; None for one that has ended. Its text may end within a
        character, or with the beginning of a stop text.
        """
        with self.engine.lock:
            s = self.live.get(id_)
            return self._completion(s, "running") if s is not None else None

    @torch.no_grad()
    def advance(self) -> list[tuple[int, Completion]]:
        """One step of the model for all that runs."""
        with self.engine.lock:
            self._check_open()
            ended = list(self.ready)
            self.ready.clear()
            if not self.live:
                return ended
            engine = self.engine
            if engine.stale:
                engine._refresh()
            rows = engine.scheduler.next_rows(self._guesser())
            began = time.perf_counter()
            logits = engine.runner.step(rows, engine.scheduler.table)
            if engine.payoff is not None and not rows.num_prompt:
                engine.payoff.saw_step(len(rows.token), time.perf_counter() - began)
            self.num_steps += 1
            self.num_prompt_rows += rows.num_prompt
            return ended + self._take(rows, logits)

    def _check_open(self) -> None:
        if self.engine.open is not self:
            raise EngineError("this stream was left: another one was opened on its engine, or the engine was closed")

    def _guesser(self) -> Callable[[Writing, int], tuple[int, ...]] | None:
        engine = self.engine
        if not engine.drafts:
            return None
        most = engine.payoff.length(max(len(engine.scheduler.running), 1)) if engine.payoff else 8
        return (lambda s, room: s.lookup.guess(s.tokens, min(most, room))) if most else None

    def _take(self, rows: Rows, logits_LV: Tensor) -> list[tuple[int, Completion]]:
        """Draw tokens for each sequence whose logits are there, and the first for those that wait for the same prompt."""
        place = 0
        todo: list[tuple[Writing, tuple[int, ...], int]] = []
        for wanted in rows.wanted:
            s = wanted.sequence
            todo.append((s, wanted.guess, place))
            if not s.logp:
                todo += [(other, (), place) for other in self.engine.scheduler.share_prompt(s)]
            place += 1 + len(wanted.guess)
        same: dict[int, list[tuple[Writing, tuple[int, ...], int]]] = {}
        for entry in todo:
            same.setdefault(id(entry[0].rules), []).append(entry)
        ended = []
        for entries in same.values():
            tokens, logps = self._draw(entries, logits_LV, shared=len(same) > 1)
            at = 0
            for s, guess, _ in entries:
                count = 1 + len(guess)
                reason = self._write(s, guess, tokens[at : at + count], logps[at : at + count])
                at += count
                if reason is not None:
                    ended.append((s.id, self._completion(s, reason)))
        return ended

    def _draw(
        self, entries: list[tuple[Writing, tuple[int, ...], int]], logits_LV: Tensor, *, shared: bool
    ) -> tuple[list[int], list[float]]:
        """shared: others draw from some of these rows too, so they stay as they are."""
        rules: _Rules = entries[0][0].rules
        places = [place + i for _, guess, place in entries for i in range(1 + len(guess))]
        owners = [(s, guess[:i]) for s, guess, _ in entries for i in range(1 + len(guess))]
        if places != list(range(len(logits_LV))):
            shared = False
            logits_LV = logits_LV[torch.tensor(places, device=logits_LV.device)]
        if rules.adjustment:
            penalized = rules.adjustment.repetition_penalty != 1.0
            logits_LV = rules.adjustment(
                logits_LV, before_N=[(*s.tokens, *guess) for s, guess in owners] if penalized else (),
                num_new_N=[s.num_drawn + len(guess) for s, guess in owners], in_place=not shared,
            )
        if rules.guide:
            logits_LV = self._guided(owners, logits_LV)
        stream = np.array([s.request.stream for s, _ in owners], dtype=np.uint64)
        index = np.array([len(s.tokens) + len(guess) for s, guess in owners], dtype=np.uint64)
        return self.engine.runner.draw(logits_LV, uniforms(stream, index), rules.sampling)

    def _guided(self, owners: list[tuple[Writing, tuple[int, ...]]], logits_LV: Tensor) -> Tensor:
        states = [_after(s.guide, guess) if guess else s.guide for s, guess in owners]
        for s, _ in owners:
            s.guide_error = ""                   # of an earlier step's row that was not reached
        allowed = np.zeros((len(states), logits_LV.shape[-1]), dtype=bool)
        for row, error in allow_all(states, allowed).items():
            owners[row][0].guide_error = str(error)
        return logits_LV.masked_fill(~torch.from_numpy(allowed).to(logits_LV.device), float("-inf"))

    def _write(self, s: Writing, guess: tuple[int, ...], tokens: Sequence[int], logps: Sequence[float]) -> str | None:
        """Append what was drawn, up to the first that a guess did not foresee. Why the sequence ends with it, or None."""
        engine, first = self.engine, not s.logp
        for i, (token, logp) in enumerate(zip(tokens, logps, strict=True)):
            s.tokens.append(token)
            s.logp.append(logp)
            s.versions.append(engine.version)
            reason = self._ended(s)
            if reason is not None or i == len(guess) or token != guess[i]:
                break
        if guess:
            self.num_guessed += len(guess)
            self.num_stood += i
            if engine.payoff is not None:
                engine.payoff.saw_guess(len(guess), i)
        s.filled += i
        broken = reason is not None and reason.startswith("error:")
        if not broken and (first or s.reads_again or reason is not None):
            engine.scheduler.learned(s)
            s.reads_again = False
        if reason is not None:
            engine.scheduler.finish(s, clear=broken)
            del self.live[s.id]
        return reason

    def _ended(self, s: Writing) -> str | None:
        if s.tokens[-1] < 0:
            return f"error:{s.guide_error}" if s.guide_error else "error:non_finite_logits"
        if reason := s.rules.stops.after(s.tokens, s.num_prompt):
            return reason
        if s.guide is not None:
            s.guide.take(s.tokens[-1])
            if s.guide.finished:
                return "grammar"
        if s.num_drawn < s.limit:
            return None
        return "max_tokens" if s.limit == s.request.max_new_tokens else "context"

    def _completion(self, s: Writing, reason: str) -> Completion:
        tokens, logp, versions = s.tokens[s.num_prompt :], s.logp, s.versions
        if reason.startswith("error:"):
            tokens, logp, versions = tokens[:-1], logp[:-1], versions[:-1]
        oldest = min(versions, default=self.engine.version)
        mixed = tuple(versions) if versions and max(versions) != oldest else ()
        return Completion(tuple(tokens), tuple(logp), s.rules.stops.text(tokens, reason), reason, oldest, mixed)


def _after(state: GuideState, guess: tuple[int, ...]) -> GuideState | None:
    """The guide behind guessed tokens; None where it does not allow them, so that they fall before this row is looked at."""
    state = state.copy()
    try:
        for token in guess:
            state.take(token)
    except GuideError:
        return None
    return state
