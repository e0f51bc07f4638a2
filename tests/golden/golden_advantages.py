"""Golden adapters of the advantages and of rewards before them."""

from __future__ import annotations

from golden_common import Columns, groups_of, reducer

from burnish.algorithms import advantages, penalties, policy_losses


def group_advantage(settings):
    if settings["scale"] == "none":
        return advantages.center
    return lambda r: advantages.standardize(r, eps=settings["eps"], ddof=settings["ddof"])


def adv_grpo(settings, inputs, dtype):
    return {"advantages": groups_of(inputs, dtype, group_advantage(settings))}


def adv_rloo(settings, inputs, dtype):
    return {"advantages": groups_of(inputs, dtype, advantages.leave_one_out)}


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


ADAPTERS = {"adv_grpo": adv_grpo, "adv_rloo": adv_rloo, "end_to_end": end_to_end}
