"""Golden adapters of policy and value losses, corrections, KL, entropy and reductions."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise

import torch
from golden_common import Columns, reducer

from burnish.algorithms import corrections, penalties, policy_losses, value_losses
from burnish.algorithms.reduce import masked
from burnish.models.logprobs import token_outputs

LOSSES = {
    "pg_ppo_clip": policy_losses.ppo_clip, "pg_reinforce": policy_losses.reinforce,
    "pg_importance_sampling": policy_losses.importance_sampling, "pg_gspo": policy_losses.gspo, "pg_gspo_token": policy_losses.gspo_token,
    "pg_cispo": policy_losses.cispo, "pg_sapo": policy_losses.sapo, "pg_dppo_tv": policy_losses.dppo_tv, "pg_gmpo": policy_losses.gmpo,
    "pg_sequence_ppo": policy_losses.sequence_ppo,
}
COLUMNS = {"logp_prox": "old_logprobs", "logp_gen": "rollout_logprobs", "adv": "advantages"}
ALL_ROWS = {"mode": "seq-mean-token-mean", "count_empty_sequences": True}


def arguments(fn, settings, c):
    """The columns and values that a loss names."""
    names = inspect.signature(fn).parameters
    columns = {name: c[COLUMNS[name]] for name in names if name in COLUMNS}
    known = {"logp_cur": c.cur, "mask": c.mask, **columns, **settings}
    return {name: known[name] for name in names if name in known}


def share(hit, mask, dtype):
    return (hit & mask).sum().to(dtype) / max(int(mask.sum()), 1)


def policy_loss(fn, settings, inputs, dtype):
    c = Columns(inputs, dtype)
    args = arguments(fn, settings, c)
    per_token = fn(**args)
    loss = reducer(settings.get("agg", ALL_ROWS), c.mask)(per_token, c.mask)
    first = c.mask.int().argmax(-1, keepdim=True)
    out = {
        "loss": loss, "grad_logprobs": c.grad(loss), "per_token_loss": masked(per_token, c.mask),
        "per_sequence_loss": masked(per_token, c.mask).gather(-1, first).squeeze(-1),
    }
    if "logp_prox" in args:
        out["sequence_ratio"] = policy_losses.sequence_ratio(c.cur - args["logp_prox"], c.mask)
    for key, attribute in (("clip_fraction", "clipped"), ("dual_clip_fraction", "dual_clipped")):
        if hasattr(fn, attribute):
            out[key] = share(getattr(fn, attribute)(**args), c.mask, dtype)
    return out


def packed_policy_loss(settings, inputs, dtype):
    """Segments become rows, as in the trainer, and go back into one line."""
    ends = inputs["cu_seqlens"]
    segments = list(pairwise(ends))
    width = max(end - start for start, end in segments)
    rows = {
        name: [inputs[name][start:end] + [0] * (width - end + start) for start, end in segments] for name in inputs if name != "cu_seqlens"
    }
    out = policy_loss(LOSSES[settings["loss"]], settings, rows, dtype)
    for name in ("grad_logprobs", "per_token_loss"):
        out[name] = torch.cat([row[: end - start] for row, (start, end) in zip(out[name], segments, strict=True)])
    return out


def microbatch_invariance(settings, inputs, dtype):
    c = Columns(inputs, dtype)
    agg = {**settings["agg"], "total_tokens": inputs["global_tokens"], "total_sequences": inputs["global_sequences"]}
    fn = LOSSES[settings["loss"]]
    args = arguments(fn, settings, c)
    losses = []
    for rows in inputs["micro_batches"]:
        part = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in args.items()}
        losses.append(reducer(agg, c.mask[rows])(fn(**part), c.mask[rows]))
    total = torch.stack(losses).sum()
    return {
        "loss": total, "grad_logprobs": c.grad(total), "micro_batch_losses_sum_reduction": torch.stack(losses),
        "micro_batch_losses_dp_mean": torch.stack(losses) * settings["dp_size"],
    }


def weights(values, log_ratio, mask):
    """The correction that `values` names, with its bounds; a bound that is null is none."""
    fn = {
        "token_truncate": corrections.token_truncate, "token_mask": corrections.token_mask,
        "sequence_truncate": corrections.sequence_truncate, "sequence_mask": corrections.sequence_mask,
        "geometric_sequence_mask": corrections.geometric_mask,
    }[values["type"]]
    bounds = {name: values[name] for name in ("low", "high", "token_cap") if values.get(name) is not None}
    weight, kept = fn(log_ratio, mask, **bounds)
    if values.get("batch_normalize"):
        total, _, count = corrections.weight_sums(weight, mask)
        weight = corrections.normalize(weight, weight_sum=total, num_tokens=count)
    return weight, kept


def corrected(settings, c, args, weight, kept):
    per_token = LOSSES["pg_ppo_clip"](**args)
    counted = kept if settings["denominator"] == "kept" else c.mask
    loss = reducer(settings["agg"], counted)(weight * per_token, counted)
    return {
        "loss": loss, "grad_logprobs": c.grad(loss), "weights": weight, "behave_weights": weight, "kept_mask": kept,
        "clip_fraction": share(policy_losses.ppo_clip.clipped(**args), c.mask, c.dtype),
    }


def is_correction(settings, inputs, dtype):
    c = Columns(inputs, dtype)
    weight, kept = weights(settings["correction"], c["old_logprobs"] - c["rollout_logprobs"], c.mask)
    return corrected(settings, c, arguments(LOSSES[settings["loss"]], settings, c), weight, kept)


def decoupled_ppo(settings, inputs, dtype):
    c = Columns({**inputs, "old_logprobs": inputs["proximal_logprobs"]}, dtype)
    cap = settings["behave_weight_cap"]
    values = {"type": settings["behave_weight_mode"] or "token_truncate", "low": 0.0, "high": math.inf if cap is None else cap}
    weight, kept = weights(values, c["proximal_logprobs"] - c["behavior_logprobs"], c.mask)
    return corrected(settings, c, arguments(LOSSES["pg_ppo_clip"], settings, c), weight, kept)


def proximal_logprob_approximation(settings, inputs, dtype):
    c = Columns(inputs, dtype)
    prox, alpha = corrections.interpolated_prox(
        c.cur, c["behavior_logprobs"], torch.tensor(inputs["versions"]), c.mask, version_cur=settings["current_version"]
    )
    return {"alpha": alpha, "proximal_logprobs": prox}


def value_loss(settings, inputs, dtype):
    c = Columns({**inputs, "logprobs": inputs["values"]}, dtype)
    args = {"value_cur": c.cur, "value_prox": c["old_values"], "ret": c["returns"], "clip": settings["clip"]}
    loss = reducer(settings["agg"], c.mask)(value_losses.clipped_error(**args), c.mask)
    hit = value_losses.clipped_error.clipped(**args)
    return {"loss": loss, "grad_values": c.grad(loss), "clip_fraction": share(hit, c.mask, dtype)}


def kl_loss(settings, inputs, dtype):
    c = Columns(inputs, dtype)
    gen = c["old_logprobs"] if "old_logprobs" in inputs else torch.zeros_like(c.cur)
    per_token = penalties.kl_loss(
        c.cur, gen, c["ref_logprobs"], estimator=settings["estimator"], gradient=settings["gradient"]
    )
    loss = settings["coef"] * reducer(settings["agg"], c.mask)(per_token, c.mask)
    return {"loss": loss, "grad_logprobs": c.grad(loss), "per_token_kl": masked(per_token, c.mask)}


def kl_exact_expectation(settings, inputs, dtype):
    logits = torch.tensor(inputs["logits"], dtype=dtype, requires_grad=True)
    ref = torch.tensor(inputs["ref_logits"], dtype=dtype)

    def grad(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    forward, logp, logp_ref = penalties.exact_kl(logits, ref), logits.log_softmax(-1), ref.log_softmax(-1)
    chance = logp.exp().detach()
    out = {
        "kl_policy_ref": forward, "grad_logits_kl_policy_ref": grad(forward),
        "grad_logits_kl_ref_policy": grad(penalties.exact_kl(ref, logits)),
    }
    for name, estimator in penalties.ESTIMATORS.items():
        out[f"expected_value_{name}"] = (chance * estimator(logp, logp_ref)).sum()
        for gradient in ("naive", "straight_through_k2", "importance_weighted"):
            per_token = penalties.kl_loss(logp, logp.detach(), logp_ref, estimator=name, gradient=gradient)
            out[f"expected_grad_logits_{name}_{gradient}"] = grad((chance * per_token).sum())
    return out


def kl_controller(settings, inputs, dtype):
    control = penalties.KlController(settings["init_coef"], settings.get("target"), settings.get("horizon", 10000))
    coefs = [control.update(k, n) for k, n in zip(inputs["kl"], inputs["n_steps"], strict=True)]
    return {"coef_after_each_update": torch.tensor(coefs, dtype=torch.float64)}


def entropy_bonus(settings, inputs, dtype):
    """The library's two ways to an entropy, held against each other."""
    logits = torch.tensor(inputs["logits"], dtype=dtype, requires_grad=True)
    mask = torch.tensor(inputs["mask"]).bool()
    nats = penalties.entropy(logits / settings["temperature"])
    token = torch.zeros(mask.numel(), dtype=torch.long)
    same = token_outputs(logits.flatten(0, 1), token, logits=lambda h: h, temperature=settings["temperature"], entropy_grad=True)
    torch.testing.assert_close(same["entropy"].view(mask.shape), nats)
    loss = -settings["coef"] * reducer(settings["agg"], mask)(nats, mask)
    return {"loss": loss, "entropy": masked(nats, mask), "grad_logits": torch.autograd.grad(loss, logits)[0]}


def token_logprobs(settings, inputs, dtype):
    logits = torch.tensor(inputs["logits"], dtype=dtype, requires_grad=True)
    flat = logits.flatten(0, 1)
    token = torch.tensor(inputs["targets"]).flatten()
    logp = token_outputs(flat, token, logits=lambda h: h, temperature=settings["temperature"], chunk=5)["logp_cur"]
    return {"logprobs": logp.view(logits.shape[:2]), "grad_logits_of_sum": torch.autograd.grad(logp.sum(), logits)[0]}


def aggregate(settings, inputs, dtype):
    value = torch.tensor(inputs["values"], dtype=dtype, requires_grad=True)
    mask = torch.tensor(inputs["mask"]).bool()
    loss = reducer(settings["agg"], mask)(value, mask)
    return {"loss": loss, "grad_values": torch.autograd.grad(loss, value)[0]}


def adapter(fn):
    return lambda settings, inputs, dtype: policy_loss(fn, settings, inputs, dtype)


ADAPTERS = {name: adapter(fn) for name, fn in LOSSES.items()} | {
    "packed_policy_loss": packed_policy_loss, "microbatch_invariance": microbatch_invariance, "is_correction": is_correction,
    "decoupled_ppo": decoupled_ppo, "proximal_logprob_approximation": proximal_logprob_approximation, "value_loss": value_loss,
    "kl_loss": kl_loss, "kl_exact_expectation": kl_exact_expectation, "kl_controller": kl_controller, "entropy_bonus": entropy_bonus,
    "token_logprobs": token_logprobs, "aggregate": aggregate,
}
