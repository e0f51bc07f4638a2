"""The reference: the policy as it was before the first update."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence

from burnish.config import Sampling
from burnish.models.policy import Policy
from burnish.trainer.columns import score_rows
from burnish.types import Rollout, Row


class Reference:
    """Frozen log-probs of what the policy wrote. With a LoRA adapter the reference is the model without it and costs no
    memory; otherwise it is one copy in the dtype that the model computes in.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.frozen = policy
        if not policy.has_adapter:
            module = copy.deepcopy(policy.module).requires_grad_(False)
            self.frozen = Policy(module.eval())

    def logprobs(
        self, rollouts: Sequence[Rollout], *, sampling: Sampling, tokens_per_micro_batch: int
    ) -> list[tuple[float, ...]]:
        """[T] nats of each rollout, 0.0 where not sampled, in the order given."""
        rows = [Row(r.tokens, r.sampled, r.logp_gen, None, 0.0, 0.0) for r in rollouts]
        with self.policy.reference() if self.policy.has_adapter else contextlib.nullcontext():
            return score_rows(self.frozen, rows, sampling=sampling, tokens_per_micro_batch=tokens_per_micro_batch)
