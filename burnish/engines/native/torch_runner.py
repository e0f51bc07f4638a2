"""Any architecture of transformers, through its own forward and a cache of pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from burnish.engines.base import EngineError
from burnish.engines.native.pages import PAGE_TOKENS
from burnish.engines.native.sampler import MIN_ROWS
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
    """Runs the newest tokens of all sequences in one forward, and each prompt in one of its own, so that its numbers do not depend on
    what else is being sampled. There is no second copy of the weights.
    """

    row_exact = False              # the rounding of a matrix product may depend on how many rows it has

    def __init__(self, policy: Policy, *, context_tokens: int) -> None:
        self.policy = policy
        self.windows = _windows(policy.config.get_text_config())
        self.cache: PagedCache | None = None

    def refresh(self) -> None:
        """The module is the one that is trained: its weights are there already."""

    def reserve(self, *, num_pages: int, rows: int) -> None:
        if self.cache is None or self.cache.num_pages != num_pages:
            self.cache = PagedCache(num_pages)

    def copy_page(self, source: int, target: int) -> None:
        self.cache.copy_page(source, target)

    def clear_page(self, page: int) -> None:
        self.cache.clear_page(page)

    def step(self, rows: Rows, table: np.ndarray) -> Tensor:
        """Writes the rows into the cache and returns the logits of the last rows. -> [L,V] float32"""
        starts = np.flatnonzero(np.diff(rows.slot, prepend=-1))
        sizes = np.diff(starts, append=len(rows.slot))
        wanted = {int(row): place for place, row in enumerate(rows.last)}
        hidden: dict[int, Tensor] = {}
        single = [int(start) for start, size in zip(starts, sizes, strict=True) if size == 1]
        if single:
            for row, one in zip(single, self._forward(rows, [[row] for row in single], table), strict=True):
                hidden[row] = one[-1]
        for start, size in zip(starts, sizes, strict=True):
            if size > 1:
                (one,) = self._forward(rows, [range(int(start), int(start + size))], table)
                if (row := int(start + size - 1)) in wanted:
                    hidden[row] = one[-1]
        if not wanted:
            return torch.zeros(0, self.policy.config.get_text_config().vocab_size)
        last = torch.stack([hidden[int(row)] for row in rows.last])
        if len(last) < MIN_ROWS:
            last = torch.cat([last, last[-1:].expand(MIN_ROWS - len(last), -1)])
        return self.policy.logits(last)[: len(rows.last)]

    def _forward(self, rows: Rows, parts: list[Any], table: np.ndarray) -> list[Tensor]:
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


def _windows(config: Any) -> dict[str, int | None]:
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
