"""Rows -> padded tensors and per-token columns, the only names a loss may ask for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.config import Sampling
from burnish.models.logprobs import Adjustment, Other, token_outputs
from burnish.types import Row

GIVEN = ("logp_gen", "logp_prox", "logp_ref", "logp_teach", "adv", "value_prox", "ret", "weight")
"""Columns that come with the rows."""
COMPUTED = ("logp_cur", "entropy", "value_cur", "score_cur", "divergence", "logp_expected")
"""Columns that come out of the model; all but an entropy that nobody asked for, and logp_expected, have a gradient."""
COLUMNS = (*GIVEN, *COMPUTED, "mask")


@dataclass(frozen=True, slots=True)
class Against:
    """A column that compares whole distributions: compare(logits_cur, logits_other) [N,V], [N,V] -> [N] for each frozen model.

    The weighted sum over the models is the column. `models` have hidden(token_BT) and logits(hidden), as a Policy.
    """

    models: Sequence[Any]
    weights: Sequence[float]
    compare: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded at the end. Column t speaks of token t; nothing stands where mask is False."""

    index: tuple[int, ...]         # places of the rows in the batch
    token_BT: Tensor
    mask_BT: Tensor                # True on the tokens that are trained on
    given: dict[str, Tensor]       # columns that every row brings, [B,T], 0 where not mask
    numbers: dict[str, Tensor]     # [B] of the numbers that every row brings


def micro_batches(rows: Sequence[Row], *, tokens_per_micro_batch: int, rows_per_unit: int = 1) -> list[list[int]]:
    """Places of rows that go through the model together, padded size within the budget; the largest first.

    Rows of like length stand together, and those of one unit always. A single unit above the budget is a micro-batch of its own.
    """
    units = [range(at, at + rows_per_unit) for at in range(0, len(rows), rows_per_unit)]
    longest = [max(len(rows[i].tokens) for i in unit) for unit in units]
    groups: list[list[int]] = []
    length = 0
    for u in sorted(range(len(units)), key=lambda u: (-longest[u], u)):
        if groups and (len(groups[-1]) + rows_per_unit) * length <= tokens_per_micro_batch:
            groups[-1].extend(units[u])
        else:
            groups.append(list(units[u]))
            length = longest[u]
    return groups


def pad(values: Sequence[Sequence[Any]], *, length: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Sequences of unequal length -> [B, length], zeros at the end."""
    out = torch.zeros(len(values), length, dtype=dtype)
    for b, value in enumerate(values):
        out[b, : len(value)] = torch.as_tensor(value, dtype=dtype)
    return out.to(device)


def collate(rows: Sequence[Row], index: Sequence[int], *, device: torch.device | str) -> MicroBatch:
    """The rows at `index` as tensors, with the columns and numbers that all of them bring."""
    chosen = [rows[i] for i in index]
    length = max(len(r.tokens) for r in chosen)
    mask_BT = pad([r.mask for r in chosen], length=length, dtype=torch.bool, device=device)
    names = [n for n in chosen[0].columns if all(n in r.columns for r in chosen)]
    given = {n: pad([r.columns[n] for r in chosen], length=length, dtype=torch.float32, device=device) for n in names}
    numbers = {
        n: torch.tensor([r.numbers[n] for r in chosen], dtype=torch.float32, device=device)
        for n in chosen[0].numbers if all(n in r.numbers for r in chosen)
    }
    given = {name: torch.where(mask_BT, column, 0.0) for name, column in given.items()}
    token_BT = pad([r.tokens for r in chosen], length=length, dtype=torch.long, device=device)
    return MicroBatch(tuple(index), token_BT, mask_BT, given, numbers)


def score(
    model: Any, batch: MicroBatch, sampling: Sampling, *, needs: Collection[str] = ("logp_cur", "entropy"),
    entropy_grad: bool = False, against: Mapping[str, Against] | None = None, values_detached: bool = False,
) -> dict[str, Tensor]:
    """The columns in `needs` and `against`, under the model as it is now. -> [B,T] each, 0 where not mask.

    logp_cur, entropy, value_cur and comparisons are read where the token is predicted, one position before it; score_cur at the
    token itself, [B,T] or [B,T,K]. Only positions of the mask go through a head. `sampling` is what the tokens were drawn with.
    values_detached: the body gets no gradient from value_cur.
    """
    hidden_BTD = model.hidden(batch.token_BT)
    row, at = torch.nonzero(batch.mask_BT, as_tuple=True)
    out: dict[str, Tensor] = {}
    if set(needs) - {"score_cur"} or against:
        if bool((at == 0).any()):
            raise ValueError("the first token of a row is to be trained on; nothing precedes it that could have predicted it")
        before_ND = hidden_BTD[row, at - 1]
    if {"logp_cur", "entropy", "logp_expected"} & set(needs) or against:
        others = {name: _others(spec, batch.token_BT, row, at) for name, spec in (against or {}).items()}
        out |= token_outputs(
            before_ND, batch.token_BT[row, at], logits=model.logits, entropy_grad=entropy_grad,
            entropy="entropy" in needs, expected="logp_expected" in needs, others=others,
            adjust=_adjust(sampling, batch, row, at), **sampling.distribution,
        )
    if "value_cur" in needs:
        out["value_cur"] = model.values(before_ND.detach() if values_detached else before_ND)
    if "score_cur" in needs:
        out["score_cur"] = model.scores(hidden_BTD[row, at])
    return {name: _spread(value, batch.mask_BT, row, at) for name, value in out.items()}


def _adjust(sampling: Sampling, batch: MicroBatch, row: Tensor, at: Tensor) -> Callable[[Tensor, int], Tensor] | None:
    """As the engine changed the logits of these positions. A turn is a run of the mask."""
    adjustment = Adjustment.of(sampling)
    if not adjustment:
        return None
    tokens, mask = batch.token_BT.tolist(), batch.mask_BT.tolist()
    places = list(zip(row.tolist(), at.tolist(), strict=True))

    def turn_so_far(b: int, t: int) -> int:
        return sum(1 for _ in itertools.takewhile(lambda on: on, reversed(mask[b][:t])))

    def adjust(logits_NV: Tensor, start: int) -> Tensor:
        here = places[start : start + len(logits_NV)]
        return adjustment(logits_NV, before_N=[tokens[b][:t] for b, t in here], num_new_N=[turn_so_far(b, t) for b, t in here])

    return adjust


def _others(spec: Against, token_BT: Tensor, row: Tensor, at: Tensor) -> tuple[list[Other], Callable[[Tensor, Tensor], Tensor]]:
    with torch.no_grad():
        return [Other(m.hidden(token_BT)[row, at - 1], m.logits, w) for m, w in zip(spec.models, spec.weights, strict=True)], spec.compare


def _spread(value: Tensor, mask_BT: Tensor, row: Tensor, at: Tensor) -> Tensor:
    """[N] or [N,K] at the positions of the mask -> [B,T] or [B,T,K]."""
    blank = torch.zeros(*mask_BT.shape, *value.shape[1:], dtype=torch.float32, device=value.device)
    return blank.index_put((row, at), value.float())


@torch.no_grad()
def score_rows(
    model: Any, rows: Sequence[Row], *, sampling: Sampling, tokens_per_micro_batch: int, column: str = "logp_cur",
) -> list[tuple[float, ...]]:
    """One column [T] of each row, 0.0 where not mask, in the order of the rows; nothing is trained. Log-probs are in nats."""
    out: list[tuple[float, ...]] = [()] * len(rows)
    for index in micro_batches(rows, tokens_per_micro_batch=tokens_per_micro_batch):
        value_BT = score(model, collate(rows, index, device=model.device), sampling, needs=(column,))[column]
        for b, i in enumerate(index):
            out[i] = tuple(value_BT[b, : len(rows[i].tokens)].tolist())
    return out
