"""Which tokens go through the model next: continuous batching over pages, prompts in chunks beside the newest tokens."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from burnish.engines.base import Request
from burnish.engines.native.pages import PAGE_TOKENS, Pages


@dataclass(slots=True, eq=False)
class Writing:
    """A request on its way. The first `filled` of its tokens are in the cache; its newest one is not."""

    id: int
    request: Request
    limit: int                                             # tokens it may be given in all
    tokens: list[int]                                      # the prompt, then what was drawn
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)      # of the weights, one a drawn token
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    promised: int = 0                                      # pages it may still take
    filled: int = 0

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def num_drawn(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pages(self) -> int:
        """Pages it needs if it is given all it may; the last token drawn is never put into the cache."""
        return -(-(self.num_prompt + self.limit - 1) // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step: token, position and slot of each, int32 [N]; `last` are the rows whose logits are wanted, with their sequences."""

    token: np.ndarray
    position: np.ndarray
    slot: np.ndarray
    last: np.ndarray
    sequences: tuple[Writing, ...]


class Scheduler:
    """Admits by room, never beyond it: a sequence starts when the pages for the most it may write are there, else it waits.

    Sequences of one prompt wait for the first of them and then share its pages; any common prefix of whole pages is shared.
    copy_page(source, target) is called where a shared page is written on.
    """

    def __init__(
        self, *, slots: int, num_pages: int, pages_per_slot: int, rows_per_step: int, copy_page: Callable[[int, int], None],
        clear_page: Callable[[int], None], whole_prompts: bool = False,
    ) -> None:
        self.slots, self.rows_per_step, self.whole_prompts = slots, rows_per_step, whole_prompts
        self.copy_page, self.clear_page = copy_page, clear_page
        self.pages = Pages(num_pages)
        self.table = np.zeros((slots, pages_per_slot), dtype=np.int32)
        self.free_slots = list(range(slots - 1, -1, -1))
        self.waiting: list[tuple[float, int, Writing]] = []       # a heap by (-priority, order)
        self.running: list[Writing] = []
        self.order = itertools.count()

    def submit(self, sequence: Writing) -> None:
        heapq.heappush(self.waiting, (-sequence.request.priority, next(self.order), sequence))

    def fits(self, sequence: Writing) -> bool:
        return sequence.num_pages <= min(self.pages.num_pages, self.table.shape[1])

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def next_rows(self) -> Rows | None:
        """Rows of the next step: the newest token of each sequence that writes, and as much of the prompts as there is room for."""
        self._admit()
        token: list[int] = []
        position: list[int] = []
        slot: list[int] = []
        last: list[int] = []
        ends: list[Writing] = []
        writing = [s for s in self.running if s.filled == len(s.tokens) - 1]
        reading = [s for s in self.running if s.filled < len(s.tokens) - 1]
        for s in writing:
            last.append(len(token))
            ends.append(s)
            token.append(s.tokens[-1])
            position.append(s.filled)
            slot.append(s.slot)
            self._reach(s, s.filled + 1)
            s.filled += 1
        for s in reading:
            room = self.rows_per_step - len(token)
            if room <= 0 and token:
                break
            count = len(s.tokens) - s.filled
            if not self.whole_prompts:
                count = min(count, max(room, 1))
            end = s.filled + count
            self._reach(s, end)
            token += s.tokens[s.filled : end]
            position += range(s.filled, end)
            slot += [s.slot] * count
            s.filled = end
            if end == len(s.tokens):
                last.append(len(token) - 1)
                ends.append(s)
        if not token:
            return None
        as_int = lambda values: np.array(values, dtype=np.int32)  # noqa: E731
        return Rows(as_int(token), as_int(position), as_int(slot), as_int(last), tuple(ends))

    def share_prompt(self, leader: Writing) -> list[Writing]:
        """Waiting sequences of the prompt that `leader` has just read to its end, started on its pages as far as there is room.

        They stand where it stands: their first token comes from the same logits.
        """
        if leader.filled != leader.num_prompt or leader.num_drawn:
            return []
        started, kept = [], []
        for entry in sorted(self.waiting, key=lambda e: e[:2]):
            s = entry[2]
            if s.request.tokens == leader.request.tokens and not s.num_drawn and self._start(s, shared=leader):
                started.append(s)
            else:
                kept.append(entry)
        if started:
            self.waiting = kept
            heapq.heapify(self.waiting)
        return started

    def learned(self, sequence: Writing) -> None:
        """Its full pages may be found by others from now on."""
        self.pages.learn(sequence.pages, sequence.tokens[: sequence.filled], start_page=0)

    def finish(self, sequence: Writing, *, clear: bool = False) -> None:
        """Its slot and pages are free again. clear: what it wrote may not be finite, and would pass through the masks of others."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.free_slots.append(sequence.slot)
            for page in sequence.pages if clear else ():
                if self.pages.holders[page] == 1:
                    self.clear_page(page)
            self._give_back(sequence)

    def cancel(self, sequence: Writing) -> None:
        self.finish(sequence, clear=True)
        self.waiting = [entry for entry in self.waiting if entry[2] is not sequence]
        heapq.heapify(self.waiting)

    def new_weights(self, *, read_again: bool) -> None:
        """No prefix crosses a version. read_again: what runs reads all its tokens anew, first of all; else it goes on with its cache."""
        self.pages.forget()
        if read_again:
            again, self.running = self.running, []
            for s in again:
                self.free_slots.append(s.slot)
                self._give_back(s)
                s.filled = 0
                heapq.heappush(self.waiting, (-math.inf, next(self.order), s))

    def _admit(self) -> None:
        reading = {s.request.tokens for s in self.running if s.filled < len(s.tokens) - 1}
        later = []
        while self.waiting and self.free_slots:
            entry = heapq.heappop(self.waiting)
            s = entry[2]
            if s.request.tokens in reading:
                later.append(entry)              # its pages are on their way
            elif self._start(s, shared=None):
                reading.add(s.request.tokens)
            else:
                later.append(entry)
                break
        for entry in later:
            heapq.heappush(self.waiting, entry)

    def _start(self, s: Writing, *, shared: Writing | None) -> bool:
        if not self.free_slots:
            return False
        if shared is not None:
            pages = shared.pages[: s.num_prompt // PAGE_TOKENS]
            for page in pages:
                self.pages.hold(page)
        else:
            pages = [] if self.whole_prompts else self.pages.find(s.tokens[: len(s.tokens) - 1])
        need = s.num_pages - len(pages)
        if need > self.pages.room:
            self.pages.release(pages)
            return False
        self.pages.promised += need
        s.promised, s.pages, s.slot = need, list(pages), self.free_slots.pop()
        s.filled = len(pages) * PAGE_TOKENS
        self.table[s.slot, : len(pages)] = pages
        if shared is not None:
            if s.num_prompt % PAGE_TOKENS:
                self._reach(s, s.num_prompt)
                self.copy_page(shared.pages[len(pages)], s.pages[-1])
            s.filled = s.num_prompt
        self.running.append(s)
        return True

    def _reach(self, s: Writing, num_tokens: int) -> None:
        """Pages for its first `num_tokens` tokens."""
        while len(s.pages) * PAGE_TOKENS < num_tokens:
            page = self.pages.take()
            s.promised -= 1
            self.table[s.slot, len(s.pages)] = page
            s.pages.append(page)

    def _give_back(self, s: Writing) -> None:
        self.pages.promised -= s.promised
        self.pages.release(s.pages)
        s.pages, s.promised, s.slot = [], 0, -1
