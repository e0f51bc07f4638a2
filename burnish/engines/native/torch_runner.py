"""Any architecture of transformers, through its own forward and a cache of pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from burnish.config import Sampling
from burnish.engines.base import EngineError
from burnish.engines.native.pages import PAGE_TOKENS
from burnish.engines.native.sampler import MIN_ROWS, draw
from burnish.engines.native.scheduler import Rows
from burnish.models.policy import Policy

# B sequences, T rows of each, S positions of the cache that attention looks at


class PagedCache(Cache):
    """Keys and values in pages; transformers calls `update` from each attention layer. One page more than asked for takes what fills up."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(layers=[])
        self.num_pages = num_pages
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.page_BT = self.offset_BT = self.table_BP = torch.zeros(0, dtype=torch.long)

    def at(self, page_BT: Tensor, offset_BT: Tensor, table_BP: Tensor) -> None:
        """Where the next forward writes, and the pages that each sequence looks at."""
        self.page_BT, self.offset_BT, self.table_BP = page_BT, offset_BT, table_BP

    @property
    def span(self) -> int:
        return self.table_BP.shape[1] * PAGE_TOKENS

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """[B,H,T,D] -> keys and values [B,H,S,D], the new tokens included."""
        if layer_idx == len(self.keys):
            for blocks, part in ((self.keys, key), (self.values, value)):
                blocks.append(part.new_zeros(self.num_pages + 1, part.shape[1], PAGE_TOKENS, part.shape[3]))
        seen = []
        for block, part in ((self.keys[layer_idx], key), (self.values[layer_idx], value)):
            block[self.page_BT, :, self.offset_BT] = part.transpose(1, 2)
            held = block[self.table_BP]                                      # [B,P,H,16,D]
            seen.append(held.transpose(1, 2).flatten(2, 3))
        return seen[0], seen[1]

    def grow(self, num_pages: int) -> None:
        """More pages; what is in them stays."""
        for blocks in (self.keys, self.values):
            for i, old in enumerate(blocks):
                blocks[i] = old.new_zeros(num_pages + 1, *old.shape[1:])
                blocks[i][: self.num_pages] = old[: self.num_pages]
        self.num_pages = num_pages

    def copy_page(self, source: int, target: int) -> None:
        for block in (*self.keys, *self.values):
            block[target] = block[source]

    def clear_page(self, page: int) -> None:
        for block in (*self.keys, *self.values):
            block[page] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.span

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.span, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.keys)


class TorchRunner:
    """Runs the newest tokens of all sequences in one forward. With batch_invariant each prompt has one of its own, so that its numbers do
    not depend on what else is being sampled; else pieces of equal length go together. There is no second copy of the weights.
    """

    row_exact = False              # the rounding of a matrix product may depend on how many rows it has

    def __init__(self, policy: Policy, *, batch_invariant: bool) -> None:
        self.policy, self.batch_invariant = policy, batch_invariant
        self.windows = windows_of(policy.config.get_text_config())
        self.cache: PagedCache | None = None

    def refresh(self) -> None:
        """The module is the one that is trained: its weights are there already."""

    def reserve(self, *, num_pages: int, rows: int) -> None:
        if self.cache is None:
            self.cache = PagedCache(num_pages)
        elif self.cache.num_pages != num_pages:
            self.cache.grow(num_pages)

    def release(self) -> None:
        """Give the cache back."""
        self.cache = None

    def copy_page(self, source: int, target: int) -> None:
        self.cache.copy_page(source, target)

    def clear_page(self, page: int) -> None:
        self.cache.clear_page(page)

    def draw(self, logits_NV: Tensor, uniform_N: np.ndarray, sampling: Sampling) -> tuple[list[int], list[float]]:
        token_N, logp_N = draw(logits_NV, uniform_N, sampling)
        both = torch.stack([token_N.double(), logp_N.double()]).tolist()     # one copy from the device
        return [int(token) for token in both[0]], both[1]

    def step(self, rows: Rows, table: np.ndarray) -> Tensor:
        """Writes the rows into the cache and returns the logits of the last rows. -> [L,V] float32. In eval mode meanwhile."""
        module = self.policy.module
        training = module.training
        if training:
            module.eval()
        try:
            return self._step(rows, table)
        finally:
            if training:
                module.train()

    def _step(self, rows: Rows, table: np.ndarray) -> Tensor:
        if not len(rows.last):
            for part in self._parts(rows):
                self._forward(rows, part, table)
            return torch.zeros(0, self.policy.config.get_text_config().vocab_size)
        hidden, order = [], []
        last = set(rows.last.tolist())
        for part in self._parts(rows):
            for at, hidden_TD in zip(part, self._forward(rows, part, table), strict=True):
                chosen = [i for i, row in enumerate(at) if row in last]
                if chosen:
                    hidden.append(hidden_TD[chosen])
                    order += [at[i] for i in chosen]
        place = {row: i for i, row in enumerate(order)}
        hidden_LD = torch.cat(hidden)[[place[row] for row in rows.last.tolist()]]
        if len(hidden_LD) < MIN_ROWS:
            hidden_LD = torch.cat([hidden_LD, hidden_LD[-1:].expand(MIN_ROWS - len(hidden_LD), -1)])
        return self.policy.logits(hidden_LD)[: len(rows.last)]

    def _parts(self, rows: Rows) -> list[list[range]]:
        """Rows of one forward each: as many of each sequence."""
        starts = np.flatnonzero(np.diff(rows.slot, prepend=-1)).tolist()
        pieces = [range(start, end) for start, end in zip(starts, [*starts[1:], len(rows.slot)], strict=True)]
        alike: dict[int, list[range]] = {}
        for piece in pieces:
            key = len(piece) if len(piece) == 1 or not self.batch_invariant else -piece.start
            alike.setdefault(key, []).append(piece)
        return list(alike.values())

    def _forward(self, rows: Rows, parts: list[range], table: np.ndarray) -> list[Tensor]:
        """Rows of several sequences, as many of each, through the body. -> [T,D] each"""
        device, count, length = self.policy.device, len(parts), len(parts[0])
        fill = max(MIN_ROWS - count, 0) if length == 1 else 0
        at = np.array([list(part) for part in parts] + [list(parts[-1])] * fill)
        position_BT = torch.from_numpy(rows.position[at].astype(np.int64)).to(device)
        slot_B = rows.slot[at[:, 0]]
        span = int(position_BT.max()) // PAGE_TOKENS + 1
        table_BP = torch.from_numpy(table[slot_B, :span].astype(np.int64)).to(device)
        page_BT = torch.gather(table_BP, 1, position_BT // PAGE_TOKENS)
        page_BT[count:] = self.cache.num_pages                               # what fills up writes where nobody reads
        self.cache.at(page_BT, position_BT % PAGE_TOKENS, table_BP)
        masks = {kind: self._mask(position_BT, window) for kind, window in self.windows.items()}
        hidden_BTD = self.policy.hidden(
            torch.from_numpy(rows.token[at].astype(np.int64)).to(device), position_BT=position_BT,
            mask=masks if len(masks) > 1 else next(iter(masks.values())), cache=self.cache,
        )
        return list(hidden_BTD[:count])

    def _mask(self, position_BT: Tensor, window: int | None) -> Tensor:
        """Added to the attention scores: 0 where a position is seen, the lowest number elsewhere. [B,T] -> [B,1,T,S]"""
        seen = torch.arange(self.cache.span, device=position_BT.device)[None, None, :]
        visible = seen <= position_BT[..., None]
        if window is not None:
            visible &= seen > position_BT[..., None] - window
        dtype = self.policy.head.weight.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def windows_of(config: Any) -> dict[str, int | None]:
    """The kinds of attention layer of this architecture and how far back each looks."""
    if hasattr(config, "attention_types"):
        raise EngineError(f"the native engine does not know {config.model_type}'s attention_types, so its samples would be wrong")
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not kinds:
        return {"full_attention": window}
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise EngineError(
            f"the native engine keeps keys and values; {config.model_type} also has layers of the kinds {sorted(unknown)}, "
            "which keep another state. Use a model with attention layers only"
        )
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
