"""Heads that give numbers in place of tokens: a critic's values, a reward model's scores, scores of the steps of an answer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
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

    def thresholds(self) -> Tensor:
        """Of ordered classes, where add_thresholds gave the module some. -> [K-1] increasing, float32"""
        return self.base.thresholds()

    def values(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [...] in float32."""
        return self.scores(hidden)

    @torch.no_grad()
    def _check(self) -> None:
        token_BT = torch.arange(4, device=self.device)[None] % self.config.get_text_config().vocab_size
        names = inspect.signature(self.base.forward).parameters
        whole = {"attention_mask": torch.ones_like(token_BT), **({"use_cache": False} if "use_cache" in names else {})}
        own = self.base(input_ids=token_BT, **whole).logits.float()
        hidden = self.hidden(token_BT)
        ours = self.head(hidden[:, -1]).float()
        room = max(1e-3, 4 * torch.finfo(hidden.dtype).eps)
        if own.shape != ours.shape or not torch.allclose(own, ours, rtol=room, atol=room * max(float(own.abs().max()), 1e-6)):
            raise ModelError(
                f"{type(self.base).__name__} does not score its last token by a linear head alone, so its scores would be wrong; "
                "use another architecture"
            )


class Thresholds(nn.Module):
    """Increasing numbers that are trained: the first one, and the logarithms of the gaps between them."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__()
        start = torch.tensor(values, dtype=torch.float32)
        self.first_and_log_gaps = nn.Parameter(torch.cat([start[:1], start.diff().log()]))

    def forward(self) -> Tensor:
        """-> [K-1] in float32"""
        raw = self.first_and_log_gaps.float()
        return torch.cat([raw[:1], raw[1:].exp()]).cumsum(0)


def add_thresholds(module: Any, *, classes: int) -> nn.Module:
    """The thresholds of a cumulative logit model (McCullagh 1980), trained with the scores and kept in the exported configuration.

    At first those of that configuration, else such that at a score of 0 every class has the probability 1 / classes. Returns them.
    ModelError where the configuration's are of another number of classes.
    """
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    values = getattr(base.config, "thresholds", None) or torch.logit(torch.arange(1, classes, dtype=torch.float64) / classes).tolist()
    if len(values) != classes - 1:
        raise ModelError(f"reward_model.classes is {classes}, but the model was trained for {len(values) + 1} classes; give that number")
    base.thresholds = Thresholds(values).to(base.score.weight.device)
    return base.thresholds


def name_pad_token(module: Any, tokenizer: Any, *, end_token_ids: Sequence[int]) -> None:
    """Give model and tokenizer a pad token that ends no answer, and padding at the end.

    transformers scores the last token that is not the pad token; were that the end token, it would score the one before. Where the
    vocabulary has none to spare, it gets <pad>, and the model a row for it.
    """
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    ends = {None, *end_token_ids, tokenizer.eos_token_id}
    if tokenizer.pad_token_id in ends:
        taken = {tokenizer.bos_token_id, *ends}
        spare = [i for i in (tokenizer.unk_token_id, *_reserved(tokenizer)) if i not in taken]
        if spare:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(spare[0])
        else:
            tokenizer.add_special_tokens({"pad_token": "<pad>"})
            if len(tokenizer) > base.get_input_embeddings().weight.shape[0]:
                base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.padding_side = "right"
    base.config.get_text_config().pad_token_id = base.config.pad_token_id = tokenizer.pad_token_id


def _reserved(tokenizer: Any) -> list[int]:
    """Special tokens that are there for nothing, by their names."""
    return [i for token, i in sorted(tokenizer.get_added_vocab().items()) if re.search(r"pad|reserved|unused", token)]


def add_value_head(module: Any) -> nn.Module:
    """A value head on a causal LM's own body, zero at first, trained with it and left out of its export. Returns the head."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    width = base.get_output_embeddings().weight.shape[1]
    base.value_head = nn.Linear(width, 1, bias=True, device=base.get_output_embeddings().weight.device)
    nn.init.zeros_(base.value_head.weight)
    nn.init.zeros_(base.value_head.bias)
    return base.value_head
