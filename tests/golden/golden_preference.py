"""Golden adapters of the preference losses. A mixture is a list of (loss, values, weight), as the trainer takes it."""

from __future__ import annotations

import inspect

import torch
from golden_common import Columns

from burnish.algorithms import preference_losses as losses
from burnish.algorithms import preference_terms as terms
from burnish.algorithms.reduce import masked

RENAMED = {"alpha_divergence_coef": "alpha", "discopop_tau": "tau"}


def columns(inputs, side, dtype):
    mask = torch.tensor(inputs[f"{side}_mask"]).bool()
    raw = torch.tensor(inputs[f"{side}_logprobs"], dtype=dtype, requires_grad=True)
    ref = torch.tensor(inputs[f"ref_{side}_logprobs"], dtype=dtype) if f"ref_{side}_logprobs" in inputs else torch.zeros_like(raw)
    return raw, masked(raw, mask), masked(ref, mask), mask


def mixture(settings):
    """The losses of one file: the preference loss and, where it has one, the term that keeps the chosen answers likely."""
    kind = settings["loss_type"]
    if kind == "sigmoid" and settings.get("reference_free"):
        kind = "cpo"
    out = [(getattr(losses, kind), settings.get("lambda", 1.0))]
    if settings.get("nll_coef"):
        out.append((losses.nll, settings["nll_coef"]))
    return out


def call(fn, args, settings):
    values = {RENAMED.get(k, k): v for k, v in settings.items()}
    values["normalization"] = settings.get("nll_normalization", "sequence_sum")
    names = inspect.signature(fn).parameters
    return fn(**{k: v for k, v in {**values, **args}.items() if k in names})


def preference_loss(settings, inputs, dtype):
    raw_w, cur_w, ref_w, mask_w = columns(inputs, "chosen", dtype)
    raw_l, cur_l, ref_l, mask_l = columns(inputs, "rejected", dtype)
    sums = {"cur_chosen": (cur_w, mask_w, mask_l), "cur_rejected": (cur_l, mask_l, mask_w)}
    sums |= {"ref_chosen": (ref_w, mask_w, mask_l), "ref_rejected": (ref_l, mask_l, mask_w)}
    args = {name: terms.sequence_logprob(logp, mask) for name, (logp, mask, _) in sums.items()}
    rewards = {
        f"{side}_rewards": terms.rewards_of(args[f"cur_{side}"], args[f"ref_{side}"], beta=settings.get("beta", 1.0))
        for side in ("chosen", "rejected")
    }
    for name, (logp, mask, other) in sums.items():
        if "ld_alpha" in settings and (settings["ld_reference"] or name.startswith("cur")):
            args[name] = terms.length_desensitized(logp, mask, other, alpha=settings["ld_alpha"])
    args |= {"tokens_chosen": mask_w.sum(-1), "tokens_rejected": mask_l.sum(-1)}
    args |= {"num_pairs": len(mask_w), "num_tokens": int(mask_w.sum())}
    shares = [weight * call(fn, args, settings) for fn, weight in mixture(settings)]
    loss = sum(shares).sum() / len(mask_w)
    grad_w, grad_l = torch.autograd.grad(loss, (raw_w, raw_l))
    return {
        "loss": loss, "grad_chosen_logprobs": grad_w, "grad_rejected_logprobs": grad_l,
        "per_pair_loss": sum(shares) if settings["loss_type"] == "slic" else shares[0],
        **rewards,
    }


def kto_loss(settings, inputs, dtype):
    c = Columns(inputs, dtype)
    log_ratio = torch.tensor(inputs["kl_logratios"], dtype=dtype)
    kl = losses.kto_baseline(log_ratio, torch.zeros_like(log_ratio))
    cur, ref = terms.sequence_logprob(c.cur, c.mask), terms.sequence_logprob(c["ref_logprobs"], c.mask)
    per_example = losses.kto(cur, ref, torch.tensor(inputs["labels"]).bool(), kl, **settings)
    loss = per_example.sum() / len(per_example)
    return {"loss": loss, "per_example_loss": per_example, "z0": kl, "grad_logprobs": c.grad(loss)}


def online_dpo(settings, inputs, dtype):
    c = Columns(inputs, dtype)
    groups = {}
    for index, group in enumerate(inputs["group_ids"]):
        groups.setdefault(group, []).append(index)
    pairs = terms.best_and_worst(torch.tensor(inputs["rewards"], dtype=dtype), groups.values())
    best, worst = map(list, zip(*pairs, strict=True))
    cur, ref = terms.sequence_logprob(c.cur, c.mask), terms.sequence_logprob(c["ref_logprobs"], c.mask)
    loss = losses.sigmoid(cur[best], cur[worst], ref[best], ref[worst], beta=settings["beta"]).sum() / len(pairs)
    return {"pairs": torch.tensor(pairs), "loss": loss, "grad_logprobs": c.grad(loss)}


ADAPTERS = {"preference_loss": preference_loss, "kto_loss": kto_loss, "online_dpo": online_dpo}
