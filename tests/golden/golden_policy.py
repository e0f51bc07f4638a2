"""Golden adapters of policy and value losses, corrections, KL, entropy and reductions."""

from __future__ import annotations

import torch
from golden_common import Columns, reducer

from burnish.algorithms import penalties, policy_losses
from burnish.algorithms.reduce import masked
from burnish.models.logprobs import token_logprobs


def aggregate(settings, inputs, dtype):
    value = torch.tensor(inputs["values"], dtype=dtype, requires_grad=True)
    mask = torch.tensor(inputs["mask"]).bool()
    loss = reducer(settings["agg"], mask)(value, mask)
    return {"loss": loss, "grad_values": torch.autograd.grad(loss, value)[0]}


def policy_loss(fn, settings, inputs, dtype, columns=("logp_prox",), clip=None):
    c = Columns(inputs, dtype)
    args = {"logp_cur": c.cur, "adv": c["advantages"], **({"logp_prox": c["old_logprobs"]} if columns else {})}
    per_token = fn(**args)
    loss = reducer(settings["agg"], c.mask)(per_token, c.mask)
    out = {"loss": loss, "grad_logprobs": c.grad(loss), "per_token_loss": masked(per_token, c.mask)}
    if clip:
        count = max(int(c.mask.sum()), 1)
        out["clip_fraction"] = (clip(**args) & c.mask).sum().to(dtype) / count
        values = {k: settings[k] for k in ("eps_low", "eps_high", "dual_clip")}
        dual = policy_losses.ppo_clip.dual_clipped(**args, **values)
        out["dual_clip_fraction"] = (dual & c.mask).sum().to(dtype) / count
    return out


def pg_ppo_clip(settings, inputs, dtype):
    values = {k: settings[k] for k in ("eps_low", "eps_high", "dual_clip")}
    return policy_loss(
        lambda **a: policy_losses.ppo_clip(**a, **values), settings, inputs, dtype,
        clip=lambda **a: policy_losses.ppo_clip.clipped(**a, **values),
    )


def pg_reinforce(settings, inputs, dtype):
    return policy_loss(policy_losses.reinforce, settings, inputs, dtype, columns=())


def pg_importance_sampling(settings, inputs, dtype):
    return policy_loss(policy_losses.importance_sampling, settings, inputs, dtype)


def kl_loss(settings, inputs, dtype):
    c = Columns(inputs, dtype)
    gen = c["old_logprobs"] if "old_logprobs" in inputs else torch.zeros_like(c.cur)
    per_token = penalties.kl_loss(
        c.cur, gen, c["ref_logprobs"], estimator=settings["estimator"], gradient=settings["gradient"]
    )
    loss = settings["coef"] * reducer(settings["agg"], c.mask)(per_token, c.mask)
    return {"loss": loss, "grad_logprobs": c.grad(loss), "per_token_kl": masked(per_token, c.mask)}


def kl_controller(settings, inputs, dtype):
    control = penalties.KlController(settings["init_coef"], settings.get("target"), settings.get("horizon", 10000))
    coefs = [control.update(k, n) for k, n in zip(inputs["kl"], inputs["n_steps"], strict=True)]
    return {"coef_after_each_update": torch.tensor(coefs, dtype=torch.float64)}


def token_logprobs_(settings, inputs, dtype):
    logits = torch.tensor(inputs["logits"], dtype=dtype, requires_grad=True)
    flat = logits.flatten(0, 1)
    token = torch.tensor(inputs["targets"]).flatten()
    logp, _ = token_logprobs(flat, token, logits=lambda h: h, temperature=settings["temperature"], chunk=5)
    return {"logprobs": logp.view(logits.shape[:2]), "grad_logits_of_sum": torch.autograd.grad(logp.sum(), logits)[0]}


def microbatch_invariance(settings, inputs, dtype):
    c = Columns(inputs, dtype)
    agg = {**settings["agg"], "total_tokens": inputs["global_tokens"], "total_sequences": inputs["global_sequences"]}
    gen, adv = c["old_logprobs"], c["advantages"]
    losses = []
    for rows in inputs["micro_batches"]:
        mask = c.mask[rows]
        per_token = policy_losses.ppo_clip(c.cur[rows], gen[rows], adv[rows], eps_low=settings["eps_low"], eps_high=settings["eps_high"])
        losses.append(reducer(agg, mask)(per_token, mask))
    total = torch.stack(losses).sum()
    return {
        "loss": total, "grad_logprobs": c.grad(total), "micro_batch_losses_sum_reduction": torch.stack(losses),
        "micro_batch_losses_dp_mean": torch.stack(losses) * settings["dp_size"],
    }


ADAPTERS = {
    "aggregate": aggregate, "pg_ppo_clip": pg_ppo_clip, "pg_reinforce": pg_reinforce, "pg_importance_sampling": pg_importance_sampling,
    "kl_loss": kl_loss, "kl_controller": kl_controller, "token_logprobs": token_logprobs_, "microbatch_invariance": microbatch_invariance,
}
