"""The one place where logits become log-probs, for the engine that samples and for the trainer that scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NEG_INF = float("-inf")


def sampling_logits(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float, keep: Tensor | None = None
) -> Tensor:
    """Logits of the distribution that is sampled from. [N,V] float32 -> [N,V], -inf where a token is left out.

    Temperature first, then top_k, top_p, min_p, each on what the one before it left. `keep` [N] names a token of each
    row that stays in any case: the trainer scores a token that was sampled, so it was in the sampler's set.
    """
    z = logits if temperature == 1.0 else logits / temperature
    if top_k == 0 and top_p == 1.0 and min_p == 0.0:
        return z
    with torch.no_grad():
        left_out = torch.zeros_like(z, dtype=torch.bool)
        if 0 < top_k < z.shape[-1]:
            left_out |= z < z.topk(top_k, -1).values[..., -1:]
        if top_p < 1.0:
            order = z.masked_fill(left_out, NEG_INF).sort(-1, descending=True)
            prob = order.values.softmax(-1)
            before = prob.cumsum(-1) - prob
            left_out |= torch.zeros_like(left_out).scatter(-1, order.indices, before >= top_p)
        if min_p > 0.0:
            floor = z.masked_fill(left_out, NEG_INF).max(-1, keepdim=True).values + torch.log(torch.tensor(min_p, device=z.device))
            left_out |= z < floor
        if keep is not None:
            left_out.scatter_(-1, keep[..., None], False)
    return z.masked_fill(left_out, NEG_INF)


def token_logprobs(
    hidden_ND: Tensor,
    token_N: Tensor,
    *,
    logits: Callable[[Tensor], Tensor],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    entropy_grad: bool = False,
    chunk: int = 512,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token and entropy of its distribution, in nats. [N,D], [N] -> [N], [N] (float32)

    `logits` maps hidden states to float32 logits. Chunks of rows are computed one after the other and again in the
    backward pass, so that [N,V] is never held. The entropy has a gradient only with entropy_grad.
    """

    def one_chunk(hidden: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        z = sampling_logits(
            logits(hidden), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, keep=token
        )
        log_mass = torch.logsumexp(z, -1)
        logp = z.gather(-1, token[:, None]).squeeze(-1) - log_mass
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
            log_prob = (z - log_mass[:, None]).masked_fill(torch.isneginf(z), 0.0)
            entropy = -(log_prob.exp() * log_prob).sum(-1)
        return logp, entropy

    logp, entropy = [], []
    for start in range(0, len(token_N), chunk):
        args = hidden_ND[start : start + chunk], token_N[start : start + chunk]
        if torch.is_grad_enabled() and len(token_N) > chunk:
            part = checkpoint(one_chunk, *args, use_reentrant=False)
        else:
            part = one_chunk(*args)
        logp.append(part[0])
        entropy.append(part[1])
    if not logp:
        empty = hidden_ND.new_zeros(0, dtype=torch.float32)
        return empty, empty
    return torch.cat(logp), torch.cat(entropy)
