"""Groups -> the batch of one step: advantages and whole-step counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from burnish.types import Batch, Group, Row


def assemble(
    groups: Sequence[Group],
    *,
    advantage: Callable[..., Tensor],
    logp_ref: Sequence[Sequence[float]] | None = None,
    kl_penalty: Sequence[float] | None = None,
) -> Batch:
    """Rows in the order of the groups. `logp_ref` (nats a token) and `kl_penalty` (subtracted from the reward before the
    baseline, arXiv:2402.14740) run over all rollouts of all groups in order.
    """
    count = sum(len(g.scored) for g in groups)
    for name, given in (("logp_ref", logp_ref), ("kl_penalty", kl_penalty)):
        if given is not None and len(given) != count:
            raise ValueError(f"{name} has {len(given)} entries for {count} rollouts")
    rows, at = [], 0
    for group in groups:
        rewards = [s.reward - (kl_penalty[at + i] if kl_penalty is not None else 0.0) for i, s in enumerate(group.scored)]
        advantages = advantage(torch.tensor(rewards, dtype=torch.float64)).tolist()
        for i, (item, adv) in enumerate(zip(group.scored, advantages, strict=True)):
            r = item.rollout
            ref = tuple(logp_ref[at + i]) if logp_ref is not None else None
            rows.append(Row(r.tokens, r.sampled, r.logp_gen, ref, adv, item.reward))
        at += len(group.scored)
    return batch_of(rows)


def batch_of(rows: Sequence[Row]) -> Batch:
    tokens = [sum(row.sampled) for row in rows]
    return Batch(tuple(rows), num_tokens=sum(tokens), num_rollouts=sum(n > 0 for n in tokens))
