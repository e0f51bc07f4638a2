"""Groups -> the batch of one step: rewards as they are trained on, advantages, one row a rollout."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms.advantages import value_targets
from burnish.algorithms.constraint import penalized
from burnish.algorithms.penalties import ESTIMATORS
from burnish.algorithms.reduce import masked
from burnish.algorithms.returns import shape_rewards
from burnish.types import Batch, Group, Row, Scored

GROUP_COLUMNS = ("reward", "num_tokens", "scores", "greedy_reward", "step_reward", "step_mask", "mask")
"""What an advantage of one group may ask for: [G], [G], [G,K], [], [G,T], [G,T], [G,T]. A rollout without rewards of steps has one
step, which ends at its last token."""
STEP_COLUMNS = (
    "reward", "num_tokens", "scores", "groups", "greedy_reward", "baseline", "token_reward", "value", "bootstrap", "mask", "logp_gen",
    "logp_teach",
)
"""What an advantage over the whole step may ask for: [B], [B], [B,K], index lists, [B], [], [B,T], [B,T], [B], [B,T], [B,T], [B,T]."""

Columns = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class KlReward:
    """coef times the KL to the reference, taken off the reward. per_token: off each token's; else its sum off the rollout's, before
    any baseline (arXiv:2402.14740).
    """

    estimator: str
    coef: float
    per_token: bool = False


def assemble(
    groups: Sequence[Group],
    *,
    advantage: Callable[..., Tensor],
    normalize: Callable[..., Tensor] | None = None,
    logp_ref: Columns | None = None,
    logp_teach: Columns | None = None,
    value: Columns | None = None,
    bootstrap: Sequence[float] | None = None,
    greedy_reward: Sequence[float] | None = None,
    baseline: float | None = None,
    kl: KlReward | None = None,
    length_penalty: Callable[..., Tensor] | None = None,
    multiplier: float | None = None,
    drop_truncated: bool = False,
    algo: str = "",
) -> Batch:
    """One row a rollout, in the order of the groups.

    What is given beside the groups runs over their rollouts in order ([T] nats or values each, or one number), greedy_reward over
    the groups. length_penalty(num_tokens) is added to the rewards; a multiplier weighs the advantages of the costs against those
    of the rewards; drop_truncated leaves rollouts that were cut off out of the rows, after the advantages were made.
    A row's `numbers` hold its reward as it was given, the version of its weights, and its place among the rollouts.
    """
    items = [item for group in groups for item in group.scored]
    for name, given in (("logp_ref", logp_ref), ("logp_teach", logp_teach), ("value", value), ("bootstrap", bootstrap)):
        if given is not None and len(given) != len(items):
            raise ValueError(f"{name} has {len(given)} entries for {len(items)} rollouts")
    if not items:
        return Batch(())
    length = max(len(item.rollout.tokens) for item in items)
    known = _known(groups, items, length, logp_teach=logp_teach, value=value, bootstrap=bootstrap)
    known["greedy_reward"] = _by_rollout(groups, greedy_reward)
    known["baseline"] = torch.tensor(0.0 if baseline is None else baseline, dtype=torch.float64)
    mask = known["mask"]
    reward = _column([item.reward for item in items])
    if length_penalty is not None:
        reward = reward + length_penalty(num_tokens=known["num_tokens"])
    kl_tokens = torch.zeros_like(mask, dtype=torch.float64)
    if kl is not None:
        kl_tokens = masked(ESTIMATORS[kl.estimator](known["logp_gen"], _tokens(logp_ref, length)), mask)
    if kl is not None and not kl.per_token:
        reward = reward - kl.coef * kl_tokens.sum(1)
        kl_tokens = torch.zeros_like(kl_tokens)
    known["shaped"] = length_penalty is not None or (kl is not None and not kl.per_token)
    adv = _advantages(advantage, groups, known, reward, kl_tokens, coef=kl.coef if kl else 0.0)
    ret = value_targets(adv, known["value"], mask) if value is not None else None
    if multiplier is not None:
        cost = _column([item.cost for item in items])
        whole = {"step_reward": torch.zeros_like(kl_tokens), "step_mask": torch.zeros_like(mask)}
        adv = penalized(adv, _advantages(advantage, groups, known | whole, cost, torch.zeros_like(kl_tokens), coef=0.0), multiplier)
    if normalize is not None:
        adv = masked(normalize(adv, mask), mask)
    columns = {"logp_ref": logp_ref, "logp_teach": logp_teach, "value_prox": value}
    return Batch(tuple(
        Row(
            item.rollout.tokens, item.rollout.sampled,
            {
                **item.rollout.columns, "adv": _cut(adv, i, item), **({"ret": _cut(ret, i, item)} if ret is not None else {}),
                **{name: tuple(given[i]) for name, given in columns.items() if given is not None},
            },
            {"reward": float(item.reward), "version": item.rollout.version, "rollout": i}, algo,
        )
        for i, item in enumerate(items) if not (drop_truncated and item.rollout.truncated)
    ))


def names_of(advantage: Callable[..., Any]) -> set[str]:
    """The columns that an advantage asks for by the names of its arguments."""
    return set(inspect.signature(advantage).parameters) & {*GROUP_COLUMNS, *STEP_COLUMNS}


def is_over_batch(advantage: Callable[..., Any]) -> bool:
    return getattr(getattr(advantage, "func", advantage), "over_batch", False)


def _advantages(
    advantage: Callable[..., Tensor], groups: Sequence[Group], known: dict[str, Any], reward: Tensor, kl_tokens: Tensor, *, coef: float
) -> Tensor:
    """[B] or [B,T] of the function -> [B,T], 0 where not mask."""
    names, mask = names_of(advantage), known["mask"]
    known = {**known, "reward": reward}
    rest = reward - known["step_reward"].sum(1)         # what is not a step's stands at the last token
    if "token_reward" in names:
        known["token_reward"] = shape_rewards(rest, kl_tokens, mask, coef=coef) + known["step_reward"]
    if "step_reward" in names:
        at_end = shape_rewards(torch.ones_like(reward), torch.zeros_like(kl_tokens), mask, coef=0.0).bool()
        at_end &= (known["shaped"] | ~known["step_mask"].any(1))[:, None]
        known["step_reward"] = known["step_reward"] + masked(rest[:, None].expand(mask.shape), at_end)
        known["step_mask"] = known["step_mask"] | at_end
    if is_over_batch(advantage):
        adv = advantage(**{name: known[name] for name in names})
    else:
        rows = iter(known["groups"])
        adv = torch.cat([advantage(**{n: known[n][at[0]] if n == "greedy_reward" else known[n][at] for n in names}) for at in rows])
    if adv.shape[:1] != mask.shape[:1] or adv.shape[1:] not in ((), mask.shape[1:]):
        raise ValueError(f"the advantage returned the shape {tuple(adv.shape)} for {len(mask)} rollouts; it gives one number a rollout "
                         "([B]) or a token ([B,T])")
    return masked(adv[:, None].expand(mask.shape) if adv.dim() == 1 else adv, mask)


def _known(
    groups: Sequence[Group], items: Sequence[Scored], length: int, *, logp_teach: Columns | None, value: Columns | None,
    bootstrap: Sequence[float] | None,
) -> dict[str, Any]:
    starts = [0]
    for group in groups:
        starts.append(starts[-1] + len(group.scored))
    names = list(items[0].scores) if all(None not in item.scores.values() for item in items) else []
    step_reward = torch.zeros(len(items), length, dtype=torch.float64)
    step_mask = torch.zeros(len(items), length, dtype=torch.bool)
    for i, item in enumerate(items):
        for at, amount in item.steps:
            step_reward[i, at] += amount
            step_mask[i, at] = True
    known = {
        "groups": [list(range(a, b)) for a, b in itertools.pairwise(starts)],
        "mask": _tokens([item.rollout.sampled for item in items], length).bool(),
        "num_tokens": _column([item.rollout.num_sampled for item in items]),
        "scores": torch.tensor([[item.scores[n] for n in names] for item in items], dtype=torch.float64),
        "logp_gen": _tokens([item.rollout.logp_gen for item in items], length),
        "bootstrap": _column(bootstrap if bootstrap is not None else [0.0] * len(items)),
        "step_reward": step_reward, "step_mask": step_mask,
    }
    if logp_teach is not None:
        known["logp_teach"] = _tokens(logp_teach, length)
    if value is not None:
        known["value"] = _tokens(value, length)
    return known


def _by_rollout(groups: Sequence[Group], value: Sequence[float] | None) -> Tensor:
    given = value if value is not None else [0.0] * len(groups)
    return _column([v for v, group in zip(given, groups, strict=True) for _ in group.scored])


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def _tokens(values: Columns, length: int) -> Tensor:
    out = torch.zeros(len(values), length, dtype=torch.float64)
    for b, row in enumerate(values):
        out[b, : len(row)] = torch.as_tensor(row, dtype=torch.float64)
    return out


def _cut(value: Tensor, i: int, item: Scored) -> tuple[float, ...]:
    return tuple(value[i, : len(item.rollout.tokens)].tolist())
