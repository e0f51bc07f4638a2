"""Heads that give numbers in place of tokens: a critic's values, a reward model's scores, scores of the steps of an answer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from burnish.models.records import ModelError


class Scorer:
    """A transformer body with a linear head: transformers' own sequence classifier, so that its export loads there.

    `values` and `scores` are that head; the trainer reads values before a token and scores at it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.base = module.get_base_model() if hasattr(module, "get_base_model") else module
        self.config = self.base.config
        self.body = getattr(self.base, self.base.base_model_prefix)
        self._check()

    @property
    def head(self) -> nn.Module:
        return self.base.score

    @property
    def device(self) -> torch.device:
        return next(self.body.parameters()).device

    @property
    def has_adapter(self) -> bool:
        return self.base is not self.module

    def hidden(self, token_BT: Tensor) -> Tensor:
        """Last hidden states. [B,T] -> [B,T,D]. Attention is causal, so padding belongs at the end."""
        return self.body(input_ids=token_BT, use_cache=False).last_hidden_state

    def scores(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., K] in float32, or [...] where the head has one output."""
        out = self.head(hidden).float()
        return out.squeeze(-1) if out.shape[-1] == 1 else out

    def values(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [...] in float32."""
        return self.scores(hidden)

    @torch.no_grad()
    def _check(self) -> None:
        token_BT = torch.arange(4, device=self.device)[None] % self.config.get_text_config().vocab_size
        names = inspect.signature(self.base.forward).parameters
        own = self.base(input_ids=token_BT, **({"use_cache": False} if "use_cache" in names else {})).logits.float()
        hidden = self.hidden(token_BT)
        ours = self.head(hidden[:, -1]).float()
        room = max(1e-3, 4 * torch.finfo(hidden.dtype).eps)
        if own.shape != ours.shape or not torch.allclose(own, ours, rtol=room, atol=room * max(float(own.abs().max()), 1e-6)):
            raise ModelError(
                f"{type(self.base).__name__} does not score its last token by a linear head alone, so its scores would be wrong; "
                "use another architecture"
            )


def add_value_head(module: Any) -> nn.Module:
    """A value head on a causal LM's own body, zero at first, trained with it and left out of its export. Returns the head."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    width = base.get_output_embeddings().weight.shape[1]
    base.value_head = nn.Linear(width, 1, bias=True, device=base.get_output_embeddings().weight.device)
    nn.init.zeros_(base.value_head.weight)
    nn.init.zeros_(base.value_head.bias)
    return base.value_head
