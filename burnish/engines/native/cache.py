"""The key/value cache: one preallocated block a layer, a slot a sequence, a position a token."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, DynamicCache


class SlotCache(Cache):
    """Keys and values of up to `slots` sequences of up to `length` tokens, kept in the first `active` slots.

    transformers calls `update` from each attention layer. Each sequence stands at a position of its own, so the mask is
    given from outside and a slot can be refilled while its neighbours go on.
    """

    def __init__(self, *, slots: int, length: int) -> None:
        super().__init__(layers=[])
        self.slots, self.length = slots, length
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.rows = torch.arange(slots)
        self.position_N = torch.zeros(0, dtype=torch.long)   # where each active sequence writes next
        self.span = 0                                        # how many positions attention looks at

    def fits(self, *, slots: int, length: int) -> bool:
        return slots <= self.slots and length <= self.length

    def at(self, position_N: Tensor) -> None:
        """The next forward writes one token a sequence at these positions. [N]"""
        self.position_N = position_N
        self.span = min(self.length, -(-(int(position_N.max()) + 1) // 16) * 16)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """[N,H,1,D] -> keys and values [N,H,span,D] of the active slots, the new token included."""
        n = key.shape[0]
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        rows = self.rows[:n]
        keys[rows, :, self.position_N] = key[:, :, 0]
        values[rows, :, self.position_N] = value[:, :, 0]
        return keys[:n, :, : self.span], values[:n, :, : self.span]

    def put(self, slot: int, prefix: list[tuple[Tensor, Tensor]]) -> None:
        """Copy a prefilled prompt, [H,T,D] a layer, into a slot."""
        if not self.keys:
            for key, value in prefix:
                self.keys.append(key.new_zeros(self.slots, key.shape[0], self.length, key.shape[2]))
                self.values.append(value.new_zeros(self.slots, value.shape[0], self.length, value.shape[2]))
            self.rows = self.rows.to(prefix[0][0].device)
        for layer, (key, value) in enumerate(prefix):
            for block, part in ((self.keys[layer], key), (self.values[layer], value)):
                block[slot, :, : part.shape[1]] = part
                block[slot, :, part.shape[1] :] = 0      # a NaN of an earlier sequence would pass through the mask

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a sequence of `length` tokens into another slot, so that active slots stay side by side."""
        for block in (*self.keys, *self.values):
            block[target, :, :length] = block[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.span

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.span, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.keys)


def prefix_of(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [H,T,D] of each layer after a prefill of one sequence."""
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]
