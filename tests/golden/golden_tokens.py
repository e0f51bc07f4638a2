"""Golden adapters of supervised fine-tuning and distillation."""

from __future__ import annotations

import torch
from golden_common import Columns, reducer

from burnish.algorithms import advantages, divergences, policy_losses, token_losses
from burnish.algorithms.reduce import masked


def sft_loss(settings, inputs, dtype):
    c = Columns(inputs, dtype)
    fn = token_losses.dft if settings["dft"] else token_losses.cross_entropy
    loss = reducer(settings["agg"], c.mask)(fn(c.cur), c.mask)
    return {"loss": loss, "grad_logprobs": c.grad(loss)}


def gkd_loss(settings, inputs, dtype):
    mask = torch.tensor(inputs["mask"]).bool()
    raw = torch.tensor(inputs["student_logits"], dtype=dtype, requires_grad=True)
    cur, teach = masked(raw, mask[..., None]), masked(torch.tensor(inputs["teacher_logits"], dtype=dtype), mask[..., None])
    per_token = divergences.generalized_jsd(cur, teach, beta=settings["beta"], temperature=settings["temperature"])
    loss = reducer(settings["agg"], mask)(per_token, mask)
    return {"loss": loss, "per_token": masked(per_token, mask), "grad_student_logits": torch.autograd.grad(loss, raw)[0]}


def opd_reverse_kl(settings, inputs, dtype):
    c = Columns(inputs, dtype)
    sampler = {"logprobs": c.cur.detach(), "old_logprobs": c["old_logprobs"]}[settings["advantage_from"]]
    adv = settings["coef"] * advantages.teacher_gap(c["teacher_logprobs"], sampler, c.mask)
    if settings["pg"] == "reinforce":
        per_token = policy_losses.reinforce(c.cur, adv)
    else:
        per_token = policy_losses.importance_sampling(c.cur, c["old_logprobs"], adv)
    loss = reducer(settings["agg"], c.mask)(per_token, c.mask)
    return {"advantages": adv, "loss": loss, "grad_logprobs": c.grad(loss)}


ADAPTERS = {"sft_loss": sft_loss, "gkd_loss": gkd_loss, "opd_reverse_kl": opd_reverse_kl}
