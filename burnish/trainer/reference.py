"""Frozen models beside the policy: the reference, which is the policy as it was, and teachers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from burnish.algorithms.divergences import mixture_logprob
from burnish.algorithms.preference_terms import mix_
from burnish.config import Sampling
from burnish.models.policy import Policy
from burnish.trainer.columns import score_rows
from burnish.types import Rollout, Row


class Reference:
    """The policy as it was before the first update, or as it was when it was last refreshed.

    With a LoRA adapter it is the model without it and costs no memory; otherwise it is one copy in the dtype that the model computes
    in. moves: it is refreshed; and with a mix below 1 it keeps float32 weights beside, from which the copy is rounded.
    """

    def __init__(self, policy: Policy, *, moves: bool = False, mix: float = 1.0) -> None:
        self.policy, self.moves, self.mix = policy, moves, mix
        self.frozen = policy
        self.exact: dict[str, Tensor] = {}
        if policy.has_adapter and moves:
            raise ValueError("a reference that moves needs weights of its own, and with model.lora it is the model without its adapter; "
                             "set preference.refresh_steps to 0, or train without model.lora")
        if not policy.has_adapter:
            module = copy.deepcopy(policy.module).requires_grad_(False)
            self.frozen = Policy(module.eval())
        if moves and mix < 1:
            self.exact = {name: p.detach().float().clone() for name, p in self.frozen.module.named_parameters()}

    @property
    def device(self) -> torch.device:
        return self.frozen.device

    def hidden(self, token_BT: Tensor) -> Tensor:
        with self._as_it_was():
            return self.frozen.hidden(token_BT)

    def logits(self, hidden: Tensor) -> Tensor:
        with self._as_it_was():
            return self.frozen.logits(hidden)

    def score(self, rows: Sequence[Row], *, sampling: Sampling, tokens_per_micro_batch: int) -> list[tuple[float, ...]]:
        """Log-probs [T] of each row in nats, 0.0 where not mask, in the order given."""
        return score_rows(self, rows, sampling=sampling, tokens_per_micro_batch=tokens_per_micro_batch)

    def logprobs(self, rollouts: Sequence[Rollout], *, sampling: Sampling, tokens_per_micro_batch: int) -> list[tuple[float, ...]]:
        """[T] nats of each rollout, 0.0 where not sampled, in the order given."""
        return self.score([Row(r.tokens, r.sampled) for r in rollouts], sampling=sampling, tokens_per_micro_batch=tokens_per_micro_batch)

    @torch.no_grad()
    def refresh(self, masters: dict[str, Tensor]) -> None:
        """Move towards the policy's weights: ref <- mix cur + (1 - mix) ref (TR-DPO, arXiv:2404.09656 eq. 2 and 3)."""
        if self.exact:
            mix_([self.exact[name] for name in masters], list(masters.values()), alpha=self.mix)
        self._take(self.exact or masters)

    def tensors(self) -> dict[str, Tensor]:
        if not self.moves:
            return {}
        return self.exact or {name: p.detach() for name, p in self.frozen.module.named_parameters()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, value in self.exact.items():
            value.copy_(tensors[name])
        self._take(tensors)

    def _take(self, tensors: dict[str, Tensor]) -> None:
        for name, p in self.frozen.module.named_parameters():
            if name in tensors:
                p.copy_(tensors[name])

    def _as_it_was(self) -> contextlib.AbstractContextManager[None]:
        return self.policy.reference() if self.policy.has_adapter else contextlib.nullcontext()


class Teachers:
    """One or several frozen models; together they stand for the weighted mean of their log-probs."""

    def __init__(self, policies: Sequence[Policy], weights: Sequence[float]) -> None:
        self.policies = tuple(policies)
        self.weights = tuple(w / sum(weights) for w in weights)

    def score(self, rows: Sequence[Row], *, sampling: Sampling, tokens_per_micro_batch: int) -> list[tuple[float, ...]]:
        """Log-probs [T] of each row in nats, 0.0 where not mask, in the order given."""
        each = [score_rows(p, rows, sampling=sampling, tokens_per_micro_batch=tokens_per_micro_batch) for p in self.policies]
        return [
            tuple(mixture_logprob(torch.tensor(logps, dtype=torch.float64)[:, None], weights=self.weights)[0].tolist())
            for logps in zip(*each, strict=True)
        ]
