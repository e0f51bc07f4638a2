"""The pages of the key/value cache: who holds which, which prefixes lie in them, and what is still promised to whom."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

PAGE_TOKENS = 16


@dataclass(slots=True)
class _Known:
    """A full page whose tokens, and all before them, are known: it may be shared by reference."""

    uid: int
    page: int


class Pages:
    """Counts references to `num_pages` pages. A page nobody holds is free, or kept for its prefix until its room is needed.

    A prefix is found by its tokens, page by page from the beginning, exactly (no hash can collide); `forget` ends all of them,
    for a new version of the weights.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = list(range(num_pages - 1, -1, -1))
        self.holders = [0] * num_pages
        self.known: dict[tuple[int, tuple[int, ...]], _Known] = {}
        self.key_of: dict[int, tuple[int, tuple[int, ...]]] = {}     # page -> its key in `known`
        self.idle: OrderedDict[int, None] = OrderedDict()            # known pages that nobody holds, oldest first
        self.promised = 0
        self.next_uid = 1

    def grow(self, num_pages: int) -> None:
        self.free = [*range(num_pages - 1, self.num_pages - 1, -1), *self.free]
        self.holders += [0] * (num_pages - self.num_pages)
        self.num_pages = num_pages

    @property
    def room(self) -> int:
        """Pages that are neither held nor promised."""
        return len(self.free) + len(self.idle) - self.promised

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest known prefix of `tokens`, held once more each."""
        found, parent = [], 0
        for start in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
            entry = self.known.get((parent, tuple(tokens[start : start + PAGE_TOKENS])))
            if entry is None:
                break
            found.append(entry.page)
            parent = entry.uid
        for page in found:
            self.hold(page)
        return found

    def hold(self, page: int) -> None:
        self.holders[page] += 1
        self.idle.pop(page, None)

    def take(self) -> int:
        """A page of one's own, out of what was promised before."""
        self.promised -= 1
        if not self.free:
            page, _ = self.idle.popitem(last=False)
            self._unknow(page)
            self.free.append(page)
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                if page in self.key_of:
                    self.idle[page] = None
                else:
                    self.free.append(page)

    def learn(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Make the full pages of `tokens`, which lie in `pages`, known. One that is known already stays as it is."""
        parent = 0
        for i in range(len(tokens) // PAGE_TOKENS):
            key = (parent, tuple(tokens[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]))
            entry = self.known.get(key)
            if entry is None:
                if pages[i] in self.key_of:
                    return                       # an earlier page was forgotten, so nothing can lead here
                entry = self.known[key] = _Known(self.next_uid, pages[i])
                self.key_of[pages[i]] = key
                self.next_uid += 1
            parent = entry.uid

    def forget(self) -> None:
        """No prefix is known any more; who holds a page keeps it."""
        self.free.extend(self.idle)
        self.idle.clear()
        self.known.clear()
        self.key_of.clear()

    def _unknow(self, page: int) -> None:
        key = self.key_of.pop(page)
        del self.known[key]
