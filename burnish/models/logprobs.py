"""The one place where logits become log-probs, for the engine that samples and for the trainer that scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from burnish.config import Sampling

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


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What is done to logits before the temperature: the same for the engine that samples and the trainer that scores.

    The repetition penalty of CTRL (arXiv:1909.05858, section 4.1) over prompt and answer, then the bias; then tokens are barred: some
    always, the end tokens while a turn has fewer than `min_new_tokens`.
    """

    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0

    @classmethod
    def of(cls, sampling: Sampling) -> Adjustment:
        """What these settings ask for. Their tokens are ids (burnish.chat.template.by_ids), else ValueError."""
        ends = sampling.end_tokens if sampling.min_new_tokens else ()
        if ends is None or any(not isinstance(token, int) for token in (*sampling.logit_bias, *sampling.banned_tokens, *ends)):
            raise ValueError("sampling names tokens that are not ids yet; give burnish.chat.template.by_ids(sampling, tokenizer)")
        return cls(
            sampling.repetition_penalty, tuple(sampling.logit_bias.items()), sampling.banned_tokens, ends, sampling.min_new_tokens
        )

    def __bool__(self) -> bool:
        return self.repetition_penalty != 1.0 or bool(self.bias or self.banned) or self.min_new_tokens > 0

    def __call__(
        self, logits_NV: Tensor, *, before_N: Sequence[Sequence[int]], num_new_N: Sequence[int], in_place: bool = False
    ) -> Tensor:
        """[N,V] -> [N,V]. before_N: the tokens before each row's; num_new_N: how many of them the turn has already."""
        z, device = logits_NV if in_place else logits_NV.clone(), logits_NV.device
        if self.repetition_penalty != 1.0:
            seen = torch.zeros(z.shape, dtype=torch.bool, device=device)
            for row, before in enumerate(before_N):
                seen[row, torch.as_tensor(before, dtype=torch.long, device=device)] = True
            z = torch.where(seen, torch.where(z < 0, z * self.repetition_penalty, z / self.repetition_penalty), z)
        if self.bias:
            ids, values = zip(*self.bias, strict=True)
            z[:, list(ids)] += torch.tensor(values, device=device)
        if self.banned:
            z[:, list(self.banned)] = NEG_INF
        if early := [row for row, num_new in enumerate(num_new_N) if num_new < self.min_new_tokens]:
            z[torch.tensor(early, device=device)[:, None], torch.tensor(self.end_token_ids, dtype=torch.long, device=device)] = NEG_INF
        return z


@dataclass(frozen=True, slots=True)
class Other:
    """A frozen model at the same positions: its hidden states [N,D], its head, its weight in the column."""

    hidden_ND: Tensor
    logits: Callable[[Tensor], Tensor]
    weight: float = 1.0


Comparison = tuple[Sequence[Other], Callable[[Tensor, Tensor], Tensor]]


def token_outputs(
    hidden_ND: Tensor,
    token_N: Tensor,
    *,
    logits: Callable[[Tensor], Tensor],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    entropy_grad: bool = False,
    entropy: bool = True,
    expected: bool = False,
    others: Mapping[str, Comparison] | None = None,
    adjust: Callable[[Tensor, int], Tensor] | None = None,
    chunk: int = 512,
) -> dict[str, Tensor]:
    """logp_cur of each token, with `entropy` that of its distribution, in nats; and comparisons with frozen models. [N,D], [N] -> [N] each

    `logits` maps hidden states to float32 logits. Chunks of rows are computed one after the other and again in the backward pass,
    so that [N,V] is never held. The entropy has a gradient only with entropy_grad. With `expected` also logp_expected, the log of
    sum_v p(v)^2, the probability that a token drawn there has on average, without a gradient. `others` holds by name frozen models and
    compare(logits_cur, logits_other) [n,V], [n,V] -> [n]; their weighted sum is the column. adjust(logits [n,V], start) changes the
    logits of rows start .. start + n before the temperature, as the engine did.
    """
    others = others or {}

    def one_chunk(start: int, hidden: Tensor, token: Tensor) -> tuple[Tensor, ...]:
        plain = logits(hidden)
        z = adjust(plain, start) if adjust else plain
        z = sampling_logits(z, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, keep=token)
        log_mass = torch.logsumexp(z, -1)
        logp = z.gather(-1, token[:, None]).squeeze(-1) - log_mass
        out = [logp]
        if entropy:
            with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
                log_prob = (z - log_mass[:, None]).masked_fill(torch.isneginf(z), 0.0)
                out.append(-(log_prob.exp() * log_prob).sum(-1))
        if expected:
            with torch.no_grad():
                out.append(torch.logsumexp(2 * (z - log_mass[:, None]), -1))
        for models, compare in others.values():
            values = []
            for other in models:
                with torch.no_grad():
                    theirs = other.logits(other.hidden_ND[start : start + len(token)])
                values.append(other.weight * compare(plain, theirs))
            out.append(torch.stack(values).sum(0))
        return tuple(out)

    names = ("logp_cur", *(("entropy",) if entropy else ()), *(("logp_expected",) if expected else ()), *others)
    parts = []
    for start in range(0, len(token_N), chunk):
        args = start, hidden_ND[start : start + chunk], token_N[start : start + chunk]
        if torch.is_grad_enabled() and len(token_N) > chunk:
            parts.append(checkpoint(one_chunk, *args, use_reentrant=False))
        else:
            parts.append(one_chunk(*args))
    if not parts:
        return {name: hidden_ND.new_zeros(0, dtype=torch.float32) for name in names}
    return {name: torch.cat(values) for name, values in zip(names, zip(*parts, strict=True), strict=True)}
