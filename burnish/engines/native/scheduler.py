"""Which tokens go through the model next: continuous batching over pages, prompts in chunks beside the newest tokens."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.engines.base import Request
from burnish.engines.native.drafts import Lookup
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
    rules: Any = None                                      # how it is drawn and when it ends
    guide: Any = None
    guide_error: str = ""
    lookup: Lookup | None = None
    waiting: bool = False
    keys_of_now: bool = True                               # all it has in the cache is of the weights of now
    reads_again: bool = False

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def num_drawn(self) -> int:
        return len(self.logp)

    @property
    def num_pages(self) -> int:
        """Pages it needs if it is given all it may; the last token drawn is never put into the cache."""
        return -(-(self.num_prompt + self.limit - 1) // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence whose next token can be drawn from this step's logits, and the tokens behind its newest that were guessed and run too."""

    sequence: Writing
    guess: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step: token, position and slot of each, int32 [N]. `last` are the rows whose logits are wanted: 1 + len(guess) for
    each of `wanted`, in its order.
    """

    token: np.ndarray
    position: np.ndarray
    slot: np.ndarray
    last: np.ndarray
    wanted: tuple[Wanted, ...]
    num_prompt: int                                        # rows that read prompts


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
        self.max_rows = slots + rows_per_step
        self.copy_page, self.clear_page = copy_page, clear_page
        self.pages = Pages(num_pages)
        self.table = np.zeros((slots, pages_per_slot), dtype=np.int32)
        self.free_slots = list(range(slots - 1, -1, -1))
        self.queue: list[tuple[float, int, Writing]] = []         # a heap by (-priority, order); some have left it since
        self.alike: dict[tuple[int, ...], list[Writing]] = {}     # those that wait, by their prompt
        self.num_waiting = 0
        self.running: list[Writing] = []
        self.order = itertools.count()

    def grow(self, *, slots: int, num_pages: int) -> None:
        """Room for more; what is there stays where it is."""
        self.table = np.concatenate([self.table, np.zeros((slots - self.slots, self.table.shape[1]), dtype=np.int32)])
        self.free_slots = [*range(slots - 1, self.slots - 1, -1), *self.free_slots]
        self.slots, self.max_rows = slots, slots + self.rows_per_step
        self.pages.grow(num_pages)

    def submit(self, sequence: Writing) -> None:
        self._wait(sequence, -sequence.request.priority)
        self.alike.setdefault(sequence.request.tokens, []).append(sequence)

    def fits(self, sequence: Writing) -> bool:
        return sequence.num_pages <= min(self.pages.num_pages, self.table.shape[1])

    def next_rows(self, guess: Callable[[Writing, int], tuple[int, ...]] | None = None) -> Rows | None:
        """Rows of the next step: the newest token of each sequence that writes with what guess(sequence, most) adds, and as much of
        the prompts as there is room for. None where nothing runs.
        """
        self._admit()
        token: list[int] = []
        position: list[int] = []
        slot: list[int] = []
        last: list[int] = []
        wanted: list[Wanted] = []
        writing = [s for s in self.running if s.filled == len(s.tokens) - 1]
        reading = [s for s in self.running if s.filled < len(s.tokens) - 1]
        for s in writing:
            guessed = ()
            if guess is not None and (room := min(s.limit - s.num_drawn - 1, self.max_rows - len(token) - len(writing))) > 0:
                guessed = guess(s, room)
            count = 1 + len(guessed)
            last += range(len(token), len(token) + count)
            wanted.append(Wanted(s, guessed))
            token += (s.tokens[-1], *guessed)
            position += range(s.filled, s.filled + count)
            slot += [s.slot] * count
            if s.filled + count > len(s.pages) * PAGE_TOKENS:
                self._reach(s, s.filled + count)
            s.filled += 1
        num_newest = len(token)
        budget = num_newest + max(self.rows_per_step - len(writing), PAGE_TOKENS)      # guesses take nothing from prompts
        for s in reading:
            room = budget - len(token)
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
                wanted.append(Wanted(s))
        if not token:
            return None
        return Rows(
            *(np.array(values, dtype=np.int32) for values in (token, position, slot, last)), tuple(wanted), len(token) - num_newest
        )

    def share_prompt(self, leader: Writing) -> list[Writing]:
        """Waiting sequences of the prompt that `leader` has just read to its end, started on its pages as far as there is room.

        They stand where it stands: their first token comes from the same logits.
        """
        if leader.filled != leader.num_prompt or leader.num_drawn:
            return []
        return [s for s in tuple(self.alike.get(leader.request.tokens, ())) if self._start(s, shared=leader)]

    def learned(self, sequence: Writing) -> None:
        """Its full pages may be found by others from now on, if they are of the weights of now."""
        if not sequence.keys_of_now:
            return
        self.pages.learn(sequence.pages, sequence.tokens[: sequence.filled])

    def finish(self, sequence: Writing, *, clear: bool = False) -> None:
        """Its slot and pages are free again. clear: what it wrote may not be finite, and would pass through the masks of others."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.free_slots.append(sequence.slot)
            if clear:
                self._clear(sequence)
            self._give_back(sequence)

    def cancel(self, sequence: Writing) -> None:
        if sequence.waiting:
            self._leave(sequence)
        else:
            self.finish(sequence, clear=True)

    def new_weights(self, *, read_again: bool) -> None:
        """No prefix crosses a version. What still reads its prompt begins anew. What writes goes on with what it has in the cache, or,
        with read_again, reads all its tokens under the new weights first.
        """
        self.pages.forget()
        going_on = []
        for s in self.running:
            if s.num_drawn and not read_again:
                s.keys_of_now = False
                going_on.append(s)
                continue
            self.free_slots.append(s.slot)
            self._clear(s)
            self._give_back(s)
            s.filled, s.keys_of_now, s.reads_again = 0, True, s.num_drawn > 0
            self._wait(s, -math.inf)
        self.running = going_on

    def _clear(self, s: Writing) -> None:
        for page in s.pages:
            if self.pages.holders[page] == 1 and page not in self.pages.key_of:
                self.clear_page(page)

    def _wait(self, s: Writing, rank: float) -> None:
        s.waiting = True
        self.num_waiting += 1
        heapq.heappush(self.queue, (rank, next(self.order), s))

    def _leave(self, s: Writing) -> None:
        s.waiting = False
        self.num_waiting -= 1
        same = self.alike.get(s.request.tokens, [])
        if s in same:
            same.remove(s)
            if not same:
                del self.alike[s.request.tokens]
        if len(self.queue) > 2 * self.num_waiting + 64:
            self.queue = [entry for entry in self.queue if entry[2].waiting]
            heapq.heapify(self.queue)

    def _admit(self) -> None:
        reading = {s.request.tokens for s in self.running if s.filled < len(s.tokens) - 1 and not s.reads_again}
        kept = sum(len(self.alike.get(tokens, ())) for tokens in reading)      # slots for those that will share what is being read
        later = []
        while self.queue and len(self.free_slots) > kept:
            entry = heapq.heappop(self.queue)
            s = entry[2]
            if not s.waiting:
                continue
            if s.request.tokens in reading and not s.reads_again:
                later.append(entry)              # its pages are on their way
            elif self._start(s, shared=None):
                if not s.reads_again:
                    reading.add(s.request.tokens)
                    kept += len(self.alike.get(s.request.tokens, ()))
            else:
                later.append(entry)
                break
        for entry in later:
            heapq.heappush(self.queue, entry)

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
        self._leave(s)
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
