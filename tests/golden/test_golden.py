"""Golden vectors: numbers worked out in float64 from the papers' formulas, against the library's public functions.

Values at masked positions are garbage on purpose. BURNISH_GOLDEN names another folder with the same schema.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from burnish.algorithms import advantages, penalties, policy_losses, reduce
from burnish.algorithms.reduce import masked
from burnish.models.logprobs import token_logprobs

FOLDER = Path(os.environ.get("BURNISH_GOLDEN", Path(__file__).parent))
FILES = sorted(FOLDER.glob("*.json"))


def reducer(agg, mask):
    """Our reduction with the counts of the whole batch."""
    rows = mask.any(-1).sum().item() if not agg.get("count_empty_sequences") else len(mask)
    counts = {
        "num_tokens": agg.get("total_tokens", mask.sum().item()), "num_rollouts": agg.get("total_sequences", rows),
    }
    names = {
        "token-mean": (reduce.token_mean, {}), "token-sum": (reduce.token_sum, {}), "seq-mean-token-mean": (reduce.rollout_mean, {}),
        "seq-mean-token-sum": (reduce.rollout_sum, {}),
        "seq-mean-token-sum-norm": (reduce.rollout_sum_over, {"length": agg.get("norm_const")}),
    }
    fn, values = names[agg["mode"]]
    return lambda loss, mask: fn(loss, mask, **counts, **values)


class Columns:
    """The inputs as the trainer would hand them to a loss: masked, with logp_cur differentiable."""

    def __init__(self, inputs, dtype):
        self.mask = torch.tensor(inputs["mask"]).bool()
        self.raw = torch.tensor(inputs["logprobs"], dtype=dtype, requires_grad=True)
        self.cur = masked(self.raw, self.mask)
        self.dtype, self.inputs = dtype, inputs

    def __getitem__(self, name):
        value = torch.tensor(self.inputs[name], dtype=self.dtype)
        if value.dim() == 1:
            value = value[:, None].expand(self.mask.shape)
        return masked(value, self.mask)

    def grad(self, loss):
        if not loss.requires_grad:
            return torch.zeros_like(self.raw)
        return torch.autograd.grad(loss, self.raw)[0]


def groups_of(inputs, dtype, fn):
    reward, ids = torch.tensor(inputs["rewards"], dtype=dtype), torch.tensor(inputs["group_ids"])
    out = torch.zeros_like(reward)
    for group in ids.unique():
        out[ids == group] = fn(reward[ids == group])
    return out


def group_advantage(settings):
    if settings["scale"] == "none":
        return advantages.center
    return lambda r: advantages.standardize(r, eps=settings["eps"], ddof=settings["ddof"])


def adv_grpo(settings, inputs, dtype):
    return {"advantages": groups_of(inputs, dtype, group_advantage(settings))}


def adv_rloo(settings, inputs, dtype):
    return {"advantages": groups_of(inputs, dtype, advantages.leave_one_out)}


def aggregate(settings, inputs, dtype):
    value = torch.tensor(inputs["values"], dtype=dtype, requires_grad=True)
    mask = torch.tensor(inputs["mask"]).bool()
    loss = reducer(settings["agg"], mask)(value, mask)
    return {"loss": loss, "grad_values": torch.autograd.grad(loss, value)[0]}


def policy_loss(fn, settings, inputs, dtype, columns=("logp_gen",), clip=None):
    c = Columns(inputs, dtype)
    args = {"logp_cur": c.cur, "adv": c["advantages"], **({"logp_gen": c["old_logprobs"]} if columns else {})}
    per_token = fn(**args)
    loss = reducer(settings["agg"], c.mask)(per_token, c.mask)
    out = {"loss": loss, "grad_logprobs": c.grad(loss), "per_token_loss": masked(per_token, c.mask)}
    if clip:
        count = max(int(c.mask.sum()), 1)
        out["clip_fraction"] = (clip(**args) & c.mask).sum().to(dtype) / count
        bound = settings.get("dual_clip")
        base = policy_losses.ppo_clip(**args, eps_low=settings["eps_low"], eps_high=settings["eps_high"])
        dual = (args["adv"] < 0) & (base > -bound * args["adv"]) if bound else torch.zeros_like(c.mask)
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


def end_to_end(settings, inputs, dtype):
    adv = groups_of(inputs, dtype, group_advantage({"ddof": 1, "eps": None, **settings}))
    c = Columns({**inputs, "advantages": adv.tolist()}, dtype)
    total = reducer(settings["agg"], c.mask)
    bounds = {"eps_low": settings["eps_low"], "eps_high": settings["eps_high"]}
    loss = total(policy_losses.ppo_clip(c.cur, c["old_logprobs"], c["advantages"], **bounds), c.mask)
    if settings["kl_coef"]:
        kl = penalties.kl_loss(c.cur, c["old_logprobs"], c["ref_logprobs"], estimator=settings["kl_estimator"], gradient="naive")
        loss = loss + settings["kl_coef"] * total(kl, c.mask)
    return {"advantages": adv, "loss": loss, "grad_logprobs": c.grad(loss)}


ADAPTERS = {
    "adv_grpo": adv_grpo, "adv_rloo": adv_rloo, "aggregate": aggregate, "pg_ppo_clip": pg_ppo_clip, "pg_reinforce": pg_reinforce,
    "pg_importance_sampling": pg_importance_sampling, "kl_loss": kl_loss, "kl_controller": kl_controller,
    "token_logprobs": token_logprobs_, "microbatch_invariance": microbatch_invariance, "end_to_end": end_to_end,
}
DIAGNOSTIC = {"wrong_mean_of_micro_batch_means"}   # what a wrong reduction would give


def test_there_are_vectors():
    assert FILES, f"no golden vectors in {FOLDER}"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_golden(path, dtype):
    case = json.loads(path.read_text())
    assert case["algorithm"] in ADAPTERS, f"no adapter for {case['algorithm']}"
    got = ADAPTERS[case["algorithm"]](case["settings"], case["inputs"], getattr(torch, dtype))
    tolerance = case["tolerance"][dtype]
    for key, expected in case["expected"].items():
        if key in DIAGNOSTIC:
            continue
        wanted = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(got[key].double(), wanted, **tolerance, msg=lambda m, key=key: f"{key}: {m}")
