"""The policy: one causal language model, split into its body and its head, as trainer and engine both use it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from burnish.models.records import ModelError


class Policy:
    """A transformers causal LM (or peft model around one). Trainer and engine share it, so there is one copy of the weights.

    `hidden` runs the body, `logits` the head; together they equal the module's own forward, which is checked when
    the policy is made, because some architectures scale or bound their logits after the head. `values` is a value head on the same
    body, where models.heads.add_value_head gave it one.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.base = module.get_base_model() if hasattr(module, "get_base_model") else module
        self.config = self.base.config
        self.body = self.base.get_decoder()
        self.head = self.base.get_output_embeddings()
        names = inspect.signature(self.body.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self._check_split()

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def has_adapter(self) -> bool:
        return self.base is not self.module

    def hidden(self, token_BT: Tensor, *, position_BT: Tensor | None = None, mask: Any = None, cache: Any = None) -> Tensor:
        """Last hidden states. [B,T] -> [B,T,D]. Without a mask attention is causal, so padding belongs at the end."""
        extra = {self.cache_name: cache} if cache is not None else {}
        out = self.body(
            input_ids=token_BT, position_ids=position_BT, attention_mask=mask, use_cache=cache is not None, **extra
        )
        return out.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits in float32. [..., D] -> [..., V]"""
        logits = self.head(hidden).float()
        if (scale := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (bound := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / bound) * bound
        return logits

    def values(self, hidden: Tensor) -> Tensor:
        """Value of the state that these hidden states stand for, float32. [..., D] -> [...]"""
        return self.base.value_head(hidden.to(self.base.value_head.weight.dtype)).float().squeeze(-1)

    scores = values

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """The policy without its adapter: the reference costs no memory where a LoRA adapter is trained."""
        with self.module.disable_adapter():
            yield

    @torch.no_grad()
    def _check_split(self) -> None:
        token_BT = torch.arange(4, device=self.device)[None] % self.config.get_text_config().vocab_size
        own = self.base(input_ids=token_BT, use_cache=False).logits.float()
        if not bool(torch.isfinite(own).all()):
            raise ModelError(f"{type(self.base).__name__} gives logits that are not finite for ordinary tokens; its weights are damaged")
        ours = self.logits(self.hidden(token_BT))
        # The architecture scales in its own dtype, `logits` in float32: they differ by that dtype's rounding
        room = max(1e-3, 4 * torch.finfo(self.head.weight.dtype).eps)
        if not torch.allclose(own, ours, rtol=room, atol=room * float(own.abs().max())):
            raise ModelError(
                f"{type(self.base).__name__} changes its logits after the head in a way burnish does not know "
                f"(largest difference {float((own - ours).abs().max()):.3g}), so its log-probs would be wrong; "
                "use another architecture, or add its scaling to burnish.models.policy"
            )
