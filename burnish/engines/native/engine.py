"""The policy as a sampler: continuous batching over pages, prompts shared, weights taken over between two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.chat.template import end_token_ids
from burnish.config import Sampling
from burnish.engines.base import Abilities, Completion, Request
from burnish.engines.native.build import NotBuilt
from burnish.engines.native.fast import FastRunner, Unsuited
from burnish.engines.native.pages import PAGE_TOKENS
from burnish.engines.native.sampler import draw, uniforms
from burnish.engines.native.scheduler import Scheduler, Writing
from burnish.engines.native.stops import Stops
from burnish.engines.native.torch_runner import TorchRunner
from burnish.models.policy import Policy


class NativeEngine:
    """Samples with the trainer's model.

    slots: sequences that write side by side; a finished one's slot is refilled at once. rows_per_step: tokens that go through the model
    in one step, the newest of each sequence and chunks of prompts together. cache_tokens: size of the cache; none: as much as the
    slots can need. compiled: None takes the compiled step where the machine and the model allow, True insists, False does without.
    """

    abilities = Abilities(logprobs=True, shares_weights=True)

    def __init__(
        self, policy: Policy, tokenizer: Any, *, context_tokens: int, slots: int = 64, rows_per_step: int = 256,
        cache_tokens: int | None = None, compiled: bool | None = None,
    ) -> None:
        self.policy, self.tokenizer = policy, tokenizer
        self.context_tokens, self.slots, self.rows_per_step, self.cache_tokens = context_tokens, slots, rows_per_step, cache_tokens
        self.version = 0
        self.why_not_compiled: str | None = None
        self.runner = self._make_runner(compiled)
        self.stale = False
        self.scheduler: Scheduler | None = None

    def load(self, version: int) -> None:
        """The weights are those of `version` from the next step on. Prefixes of earlier versions are forgotten."""
        if version != self.version:
            self.version, self.stale = version, True
            if self.scheduler is not None:
                self.scheduler.new_weights(read_again=False)

    def close(self) -> None:
        self.scheduler = None

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests; see Engine. Uses the module in eval mode and leaves it as it was."""
        stream = self.stream(sampling, requests)
        ids = [stream.submit(request) for request in requests]
        done: dict[int, Completion] = {}
        while len(done) < len(ids):
            done |= dict(stream.advance())
            if progress:
                progress(len(done), len(ids))
        return [done[i] for i in ids]

    def stream(self, sampling: Sampling, expected: Sequence[Request] = ()) -> Stream:
        """Requests that come and go: submit, cancel, advance. `expected` sizes the cache where cache_tokens does not."""
        longest = max((len(r.tokens) + min(r.max_new_tokens, self.context_tokens) for r in expected), default=self.context_tokens)
        per_slot = -(-min(longest, self.context_tokens) // PAGE_TOKENS)
        slots = max(min(self.slots, len(expected) or self.slots), 1)
        num_pages = self.cache_tokens // PAGE_TOKENS if self.cache_tokens else slots * per_slot
        self._make_scheduler(slots=slots, per_slot=per_slot, num_pages=num_pages)
        return Stream(self, sampling)

    def _make_scheduler(self, *, slots: int, per_slot: int, num_pages: int) -> None:
        have = self.scheduler
        if have is not None and have.idle and have.slots >= slots and have.table.shape[1] >= per_slot and have.pages.num_pages >= num_pages:
            return
        if have is not None:
            slots, per_slot = max(slots, have.slots), max(per_slot, have.table.shape[1])
            num_pages = num_pages if self.cache_tokens else max(num_pages, slots * per_slot)
        self.runner.reserve(num_pages=num_pages, rows=slots + max(self.rows_per_step, 1) + per_slot * PAGE_TOKENS)
        self.scheduler = Scheduler(
            slots=slots, num_pages=num_pages, pages_per_slot=per_slot, rows_per_step=self.rows_per_step, copy_page=self.runner.copy_page,
            clear_page=self.runner.clear_page, whole_prompts=not self.runner.row_exact,
        )

    def _make_runner(self, compiled: bool | None) -> FastRunner | TorchRunner:
        if compiled is not False:
            try:
                return FastRunner(self.policy, context_tokens=self.context_tokens)
            except (NotBuilt, Unsuited) as error:
                if compiled:
                    raise
                self.why_not_compiled = str(error)
        return TorchRunner(self.policy, context_tokens=self.context_tokens)


class Stream:
    """One sampling's requests on an engine. `advance` makes one step and gives what has ended in it."""

    def __init__(self, engine: NativeEngine, sampling: Sampling) -> None:
        self.engine, self.sampling = engine, sampling
        self.stops = Stops(engine.tokenizer, end_token_ids=end_token_ids(engine.tokenizer, sampling.end_tokens), stop=sampling.stop)
        self.live: dict[int, Writing] = {}
        self.refused: deque[tuple[int, Completion]] = deque()
        self.next_id = 0
        self.plain = not (sampling.top_k or sampling.top_p < 1 or sampling.min_p)

    def submit(self, request: Request) -> int:
        """The id by which `advance` and `cancel` speak of it. One that cannot run ends as error:<what> at the next advance."""
        id_, self.next_id = self.next_id, self.next_id + 1
        room = self.engine.context_tokens - len(request.tokens)
        s = Writing(id_, request, min(request.max_new_tokens, room), list(request.tokens))
        what = "empty_prompt" if not request.tokens else "prompt_too_long" if room < 1 else None
        if what is None and not self.engine.scheduler.fits(s):
            what = "no_room_in_cache"
        if what is not None:
            self.refused.append((id_, Completion((), (), "", f"error:{what}", self.engine.version)))
            return id_
        self.live[id_] = s
        self.engine.scheduler.submit(s)
        return id_

    def cancel(self, id_: int) -> None:
        """Take a request out, whatever it has written. One that is not there any more is left alone."""
        if (s := self.live.pop(id_, None)) is not None:
            self.engine.scheduler.cancel(s)

    @torch.no_grad()
    def advance(self) -> list[tuple[int, Completion]]:
        """One step of the model for all that runs. The module is in eval mode meanwhile."""
        ended = list(self.refused)
        self.refused.clear()
        if not self.live:
            return ended
        engine, module = self.engine, self.engine.policy.module
        training = module.training
        module.eval()
        try:
            if engine.stale:
                engine.runner.refresh()
                engine.stale = False
            rows = engine.scheduler.next_rows()
            logits = engine.runner.step(rows, engine.scheduler.table)
        finally:
            module.train(training)
        return ended + self._take(list(rows.sequences), logits)

    def _take(self, sequences: list[Writing], logits_LV: Tensor) -> list[tuple[int, Completion]]:
        """Draw a token for each sequence whose logits are there, and for those that wait for the same prompt."""
        scheduler, places = self.engine.scheduler, list(range(len(sequences)))
        for place, s in list(enumerate(sequences)):
            if s.num_drawn == 0:
                for other in scheduler.share_prompt(s):
                    sequences.append(other)
                    places.append(place)
        if len(places) > len(logits_LV):
            logits_LV = logits_LV[torch.tensor(places, device=logits_LV.device)]
        stream = np.array([s.request.stream for s in sequences], dtype=np.uint64)
        index = np.array([len(s.tokens) for s in sequences], dtype=np.uint64)
        tokens, logps = self._draw(logits_LV, uniforms(stream, index))
        ended = []
        for s, token, logp in zip(sequences, tokens, logps, strict=True):
            s.tokens.append(token)
            s.logp.append(logp)
            s.versions.append(self.engine.version)
            reason = self._ended(s)
            broken = reason is not None and reason.startswith("error:")
            if not broken and (s.num_drawn == 1 or reason is not None):
                scheduler.learned(s)
            if reason is not None:
                scheduler.finish(s, clear=broken)
                del self.live[s.id]
                ended.append((s.id, self._completion(s, reason)))
        return ended

    def _draw(self, logits_LV: Tensor, uniform_L: np.ndarray) -> tuple[list[int], list[float]]:
        if self.plain and isinstance(self.engine.runner, FastRunner):
            return self.engine.runner.draw(logits_LV, uniform_L, temperature=self.sampling.temperature)
        token_L, logp_L = draw(logits_LV, uniform_L, self.sampling)
        return token_L.tolist(), logp_L.tolist()

    def _ended(self, s: Writing) -> str | None:
        if s.tokens[-1] < 0:
            return "error:non_finite_logits"
        if reason := self.stops.after(s.tokens[max(s.num_prompt, len(s.tokens) - self.stops.window) :]):
            return reason
        if s.num_drawn < s.limit:
            return None
        return "max_tokens" if s.limit == s.request.max_new_tokens else "context"

    def _completion(self, s: Writing, reason: str) -> Completion:
        tokens, logp = s.tokens[s.num_prompt :], s.logp
        if reason.startswith("error:"):
            tokens, logp = tokens[:-1], logp[:-1]
        return Completion(tuple(tokens), tuple(logp), self.stops.text(tokens, reason), reason, min(s.versions))
