"""AdamW and the learning rate of each update."""

from __future__ import annotations

import math

import torch

from burnish.trainer.precision import Weights


def schedule(update: int, *, total: int, lr: float, warmup_updates: int, kind: str, final_lr_frac: float) -> float:
    """Learning rate of update 1..total. Linear warm-up reaches lr at update `warmup_updates`; then constant, or a line or a
    half cosine down to final_lr_frac * lr at the last update. A warm-up as long as the run is a warm-up only.
    """
    if not 1 <= update <= total:
        raise ValueError(f"update {update} is not in 1..{total}")
    if update <= warmup_updates:
        return lr * update / warmup_updates
    if kind == "constant":
        return lr
    progress = (update - warmup_updates) / (total - warmup_updates)
    shape = 1 - progress if kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return lr * (final_lr_frac + (1 - final_lr_frac) * shape)


def adamw(weights: Weights, *, betas: tuple[float, float], eps: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) on the float32 masters; matrices decay, vectors (norms, biases) do not. lr is set each update."""
    masters = weights.masters.values()
    return torch.optim.AdamW(
        [
            {"params": [m for m in masters if m.dim() >= 2], "weight_decay": weight_decay},
            {"params": [m for m in masters if m.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.0, betas=betas, eps=eps, fused=True,
    )
