"""One token a row from a distribution and one uniform number; the number depends on (stream, index) and nothing else."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from burnish.config import Sampling
from burnish.models.logprobs import sampling_logits

BLOCK = 256
MIN_ROWS = 8
"""Matrix products of fewer rows take other kernels with other rounding; padding to this keeps a row equal to itself."""


def stream_key(seed: int, task_id: str, sample: int, purpose: str = "train") -> int:
    """The 64-bit key of sample n of a task: the same in any run, process, batch and order."""
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{task_id}\0{sample}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def uniforms(stream_N: np.ndarray, index_N: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), a counter-based generator: splitmix64 of the key and the index. uint64 [N] -> float64 [N]"""
    return (_mix(stream_N ^ _mix(index_N.astype(np.uint64))) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def draw(logits_NV: Tensor, uniform_N: np.ndarray, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Token and its log-prob under the distribution it was drawn from. [N,V] float32, [N] -> [N] int64, [N] float32

    The inverse of the cumulative distribution, in two stages: which block of the vocabulary, then which token in it.
    A row without any finite logit gives token -1.
    """
    if sampling.temperature == 0:
        token_N = logits_NV.argmax(-1)
        return _marked(token_N, logits_NV), torch.zeros(len(token_N), device=logits_NV.device)
    z = sampling_logits(logits_NV, **sampling.distribution)
    log_mass_N = torch.logsumexp(z, -1)
    prob = torch.exp(z - log_mass_N[:, None])
    if prob.device.type == "mps":                  # has no float64
        prob, z, log_mass_N = prob.cpu(), z.cpu(), log_mass_N.cpu()
    if extra := -prob.shape[-1] % BLOCK:
        prob = torch.nn.functional.pad(prob, (0, extra))
    block_prob = prob.view(len(prob), -1, BLOCK)
    upto = block_prob.sum(-1, dtype=torch.float64).cumsum(-1)
    goal_N = torch.from_numpy(uniform_N).to(upto.device) * upto[:, -1]
    block_N = (upto <= goal_N[:, None]).sum(-1).clamp(max=upto.shape[-1] - 1)
    rows = torch.arange(len(prob), device=prob.device)
    before_N = torch.where(block_N > 0, upto[rows, (block_N - 1).clamp(min=0)], 0.0)
    inside = block_prob[rows, block_N].double()
    offset_N = (inside.cumsum(-1) <= (goal_N - before_N)[:, None]).sum(-1).clamp(max=BLOCK - 1)
    empty = inside[rows, offset_N] == 0
    offset_N = torch.where(empty, inside.argmax(-1), offset_N)   # the goal fell behind the block's last token by rounding
    token_N = block_N * BLOCK + offset_N
    token_N = _marked(token_N.clamp(max=z.shape[-1] - 1), z)
    logp_N = z.gather(-1, token_N.clamp(min=0)[:, None]).squeeze(-1) - log_mass_N
    return token_N, logp_N


def _marked(token_N: Tensor, logits_NV: Tensor) -> Tensor:
    """-1 where the logits were not usable (NaN or +inf), so that the caller ends that sequence as an error."""
    usable = torch.isfinite(logits_NV.max(-1).values) & ~torch.isnan(logits_NV).any(-1)
    return torch.where(usable, token_N, -1)
