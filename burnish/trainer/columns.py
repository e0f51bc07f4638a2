"""Rows -> padded tensors and per-token columns, the only names a loss may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.config import Sampling
from burnish.models.logprobs import token_logprobs
from burnish.models.policy import Policy
from burnish.types import Row

COLUMNS = ("logp_cur", "logp_gen", "logp_prox", "logp_ref", "adv", "entropy", "mask")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded at the end. Column t speaks of token t; nothing stands where mask is False."""

    index: tuple[int, ...]         # places of the rows in the batch
    token_BT: Tensor
    mask_BT: Tensor                # True on sampled tokens
    given: dict[str, Tensor]       # logp_gen, adv, logp_ref and logp_prox where known; all [B,T], 0 where not mask


def micro_batches(rows: Sequence[Row], *, tokens_per_micro_batch: int) -> list[list[int]]:
    """Places of rows that go through the model together, padded size within the budget; the largest first.

    Rows of like length stand together. A single row above the budget is a micro-batch of its own.
    """
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].tokens), i))
    groups: list[list[int]] = []
    for i in order:
        if groups and (len(groups[-1]) + 1) * len(rows[groups[-1][0]].tokens) <= tokens_per_micro_batch:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def collate(
    rows: Sequence[Row], index: Sequence[int], *, device: torch.device, prox: Sequence[Sequence[float]] | None = None
) -> MicroBatch:
    """The rows at `index` as tensors. `prox` are log-probs [T] of each row at the start of this step's updates."""
    chosen = [rows[i] for i in index]
    length = max(len(r.tokens) for r in chosen)

    def padded(values: list[Sequence], dtype: torch.dtype) -> Tensor:
        out = torch.zeros(len(values), length, dtype=dtype)
        for b, value in enumerate(values):
            out[b, : len(value)] = torch.tensor(value, dtype=dtype)
        return out.to(device)

    mask_BT = padded([r.sampled for r in chosen], torch.bool)
    given = {
        "logp_gen": padded([r.logp_gen for r in chosen], torch.float32),
        "adv": padded([[r.adv] * len(r.tokens) for r in chosen], torch.float32),
    }
    if all(r.logp_ref is not None for r in chosen):
        given["logp_ref"] = padded([r.logp_ref for r in chosen], torch.float32)
    if prox is not None:
        given["logp_prox"] = padded([prox[i] for i in index], torch.float32)
    given = {name: torch.where(mask_BT, column, 0.0) for name, column in given.items()}
    return MicroBatch(tuple(index), padded([r.tokens for r in chosen], torch.long), mask_BT, given)


def score(policy: Policy, batch: MicroBatch, sampling: Sampling, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of each sampled token under the policy as it is now. -> [B,T], [B,T], 0 where not mask.

    Only the positions that predict a sampled token go through the head. `sampling` is what they were drawn with.
    """
    hidden_BTD = policy.hidden(batch.token_BT)
    row, at = torch.nonzero(batch.mask_BT, as_tuple=True)
    if bool((at == 0).any()):
        raise ValueError("the first token of a rollout is marked as sampled; nothing precedes it that could have predicted it")
    logp_N, entropy_N = token_logprobs(
        hidden_BTD[row, at - 1], batch.token_BT[row, at], logits=policy.logits, entropy_grad=entropy_grad, **sampling.distribution
    )
    blank = torch.zeros(batch.mask_BT.shape, dtype=torch.float32, device=logp_N.device)
    return blank.index_put((row, at), logp_N), blank.index_put((row, at), entropy_N)


@torch.no_grad()
def score_rows(
    policy: Policy, rows: Sequence[Row], *, sampling: Sampling, tokens_per_micro_batch: int
) -> list[tuple[float, ...]]:
    """Log-probs [T] of each row in nats, 0.0 where not sampled, in the order of the rows; nothing is trained."""
    out: list[tuple[float, ...]] = [()] * len(rows)
    for index in micro_batches(rows, tokens_per_micro_batch=tokens_per_micro_batch):
        logp_BT, _ = score(policy, collate(rows, index, device=policy.device), sampling)
        for b, i in enumerate(index):
            out[i] = tuple(logp_BT[b, : len(rows[i].tokens)].tolist())
    return out
