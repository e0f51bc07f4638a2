"""Losses of reward models: scores in, one number per pair, entry or position out; the mean is taken outside, by `reduce`.

P pairs of a chosen and a rejected answer, B answers, K objectives or ordered classes, C classes of a step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.algorithms.reduce import masked


def bradley_terry(score_chosen: Tensor, score_rejected: Tensor, *, margin: Tensor | None = None) -> Tensor:
    """-log sigmoid(s_chosen - s_rejected - margin). [P], [P] -> [P]

    arXiv:2203.02155 eq. 1; margin [P], how much better the chosen one is, from arXiv:2307.09288 eq. 2.
    """
    gap = score_chosen - score_rejected
    return -F.logsigmoid(gap if margin is None else gap - margin)


def centering(score_chosen: Tensor, score_rejected: Tensor) -> Tensor:
    """(s_chosen + s_rejected)^2: ties the scores to 0, which `bradley_terry` leaves free. [P], [P] -> [P]. arXiv:2312.09244."""
    return (score_chosen + score_rejected) ** 2


def prefers_chosen(score_chosen: Tensor, score_rejected: Tensor) -> Tensor:
    """True where the chosen answer scores higher; a tie is False. [P], [P] -> bool [P]. Its mean is the model's accuracy."""
    return score_chosen > score_rejected


def squared_error(score: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """(s - y)^2, 0 where no label is given. [B] or [B,K], mask bool -> the same

    Regression; with K objectives the first stage of ArmoRM, arXiv:2406.12845. The value and gradient do not see what stands
    at masked entries.
    """
    return masked(score - target, mask) ** 2


def ordinal(score: Tensor, label: Tensor, thresholds: Tensor) -> Tensor:
    """-log P(y = label) with P(y <= k) = sigmoid(theta_k - s). [B], [B] in 0..K-1, [K-1] -> [B]

    Cumulative logit model (McCullagh 1980). With a = theta_k - s, b = theta_(k-1) - s:
    log(sigmoid(a) - sigmoid(b)) = log sigmoid(a) + log sigmoid(-b) + log(1 - exp(b - a)), which is finite for every score.
    Raises ValueError if the thresholds do not increase strictly (probabilities would be negative) or a label is out of range.
    """
    gap = thresholds.diff()
    if not bool((gap > 0).all()):
        raise ValueError(f"the thresholds must increase strictly: {thresholds.tolist()}")
    wrong = label[(label < 0) | (label > len(thresholds))]
    if len(wrong):
        raise ValueError(f"{len(thresholds)} thresholds allow labels 0 to {len(thresholds)}, not {wrong.tolist()}")
    above = F.logsigmoid(thresholds - score[:, None])
    below = F.logsigmoid(score[:, None] - thresholds)
    logp = F.pad(above, (0, 1)) + F.pad(below, (1, 0)) + F.pad(torch.log(-torch.expm1(-gap)), (1, 1))
    return -logp.gather(-1, label[:, None]).squeeze(-1)


def step_cross_entropy(logits: Tensor, label: Tensor, *, ignore_label: int) -> Tensor:
    """-log softmax(z)_label at labelled positions, 0 elsewhere. [...,C], [...] -> [...]

    Process reward model as classification at the end of each step: arXiv:2305.20050, arXiv:2312.08935.
    """
    z = masked(logits, (label != ignore_label)[..., None])
    loss = F.cross_entropy(z.flatten(0, -2), label.flatten(), reduction="none", ignore_index=ignore_label)
    return loss.view(label.shape)
