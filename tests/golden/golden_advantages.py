"""Golden adapters of the advantages and of rewards before them."""

from __future__ import annotations

import torch
from golden_common import Columns, groups_of, reducer

from burnish.algorithms import advantages, penalties, policy_losses, returns
from burnish.algorithms.reduce import masked
from burnish.rollout.keep import is_constant


def columns(inputs, dtype):
    """The inputs as tensors: masks as bool, groups as lists of rows."""
    out = {k: torch.tensor(v).bool() if k in ("mask", "truncated") else torch.tensor(v, dtype=dtype) for k, v in inputs.items()}
    if ids := inputs.get("group_ids"):
        out["groups"] = [[row for row, of in enumerate(ids) if of == group] for group in sorted(set(ids))]
    return out


def pick(settings, *names):
    return {name: settings[name] for name in names}


def group_advantage(settings):
    if settings["scale"] == "none":
        return advantages.center
    return lambda r: advantages.standardize(r, **pick(settings, "eps", "ddof"))


def adv_grpo(settings, inputs, dtype):
    if settings["scale"] == "batch":
        c = columns(inputs, dtype)
        return {"advantages": advantages.standardize_by_batch(c["rewards"], c["groups"], **pick(settings, "eps", "ddof"))}
    return {"advantages": groups_of(inputs, dtype, group_advantage(settings))}


def adv_rloo(settings, inputs, dtype):
    return {"advantages": groups_of(inputs, dtype, advantages.leave_one_out)}


def adv_opo(settings, inputs, dtype):
    c = columns(inputs, dtype)
    out = torch.zeros_like(c["rewards"])
    for rows in c["groups"]:
        out[rows] = advantages.length_weighted(c["rewards"][rows], c["lengths"][rows])
    return {"advantages": out}


def adv_gpg(settings, inputs, dtype):
    c = columns(inputs, dtype)
    return {
        "advantages": advantages.rescale_by_signal(c["rewards"], c["groups"], **settings),
        "alpha": advantages.signal_scale(c["rewards"], c["groups"]),
    }


def adv_gdpo(settings, inputs, dtype):
    c = columns(inputs, dtype)
    return {"advantages": advantages.standardize_each(c["rewards"], c["groups"], **settings)}


def adv_reinforce(settings, inputs, dtype):
    c = columns(inputs, dtype)
    reward, mask, gamma = c["token_rewards"], c["mask"], settings["gamma"]
    to_go = advantages.returns_to_go(reward, mask, gamma=gamma)
    adv = {
        "none": lambda: to_go,
        "batch_mean": lambda: advantages.returns_minus_batch_mean(reward, mask, gamma=gamma),
        "given": lambda: advantages.returns_minus_baseline(reward, c["baseline"], mask, gamma=gamma),
    }[settings["baseline"]]()
    return {"advantages": adv, "returns": to_go}


def shaped(settings, c):
    kl = penalties.ESTIMATORS[settings["estimator"]](c["logprobs"], c["ref_logprobs"])
    return returns.shape_rewards(c["rewards"], kl, c["mask"], coef=settings["beta"])


def reward_kl_shaping(settings, inputs, dtype):
    return {"token_rewards": shaped(settings, columns(inputs, dtype))}


def adv_reinforce_pp(settings, inputs, dtype):
    c = columns(inputs, dtype)
    to_go = advantages.returns_to_go(shaped(settings, c), c["mask"], gamma=settings["gamma"])
    return {"advantages": advantages.whiten(to_go, c["mask"], **pick(settings, "eps", "ddof")), "returns": to_go}


def adv_reinforce_pp_baseline(settings, inputs, dtype):
    mask = columns(inputs, dtype)["mask"]
    centred = groups_of(inputs, dtype, advantages.center)[:, None].expand(mask.shape)
    return {"advantages": advantages.whiten(centred, mask, **settings)}


def adv_remax(settings, inputs, dtype):
    c = columns(inputs, dtype)
    reward, mask = c["token_rewards"], c["mask"]
    return {
        "advantages": advantages.returns_above_greedy(reward, c["greedy_rewards"], mask), "returns": advantages.returns_to_go(reward, mask),
    }


def adv_gae(settings, inputs, dtype):
    c = columns(inputs, dtype)
    bootstrap = c["bootstrap_values"] if "bootstrap_values" in c else torch.zeros(len(c["mask"]), dtype=dtype)
    adv = advantages.gae(c["token_rewards"], c["values"], c["mask"], bootstrap, **pick(settings, "gamma", "lam"))
    out = {"advantages": adv, "returns": advantages.value_targets(adv, c["values"], c["mask"])}
    if settings["whiten"]:
        out["advantages"] = advantages.whiten(adv, c["mask"], **pick(settings, "eps", "ddof"))
    return out


def adv_whiten(settings, inputs, dtype):
    c = columns(inputs, dtype)
    return {"values": advantages.whiten(c["values"], c["mask"], **settings)}


def kept_rows(metric, groups):
    """The groups that dynamic sampling keeps, and for each row whether its group is one of them."""
    kept = [rows for rows in groups if not is_constant([metric[row] for row in rows])]
    keep = torch.zeros(len(metric), dtype=torch.bool)
    for rows in kept:
        keep[rows] = True
    return kept, keep


def dapo_dynamic_sampling(settings, inputs, dtype):
    kept, keep = kept_rows(inputs["metric"], columns(inputs, dtype)["groups"])
    return {"keep": keep, "num_kept_groups": len(kept)}


def dapo_overlong(settings, inputs, dtype):
    bounds = {"max_tokens": settings["max_length"], "cache_tokens": settings["cache"], "factor": settings["factor"]}
    return {"penalty": returns.soft_overlong(columns(inputs, dtype)["lengths"], **bounds)}


def dapo_overlong_filter(settings, inputs, dtype):
    c = columns(inputs, dtype)
    return {"mask": returns.without_truncated(c["mask"], c["truncated"])}


def end_to_end(settings, inputs, dtype):
    extra = {}
    c = Columns(inputs, dtype)
    mask = c.mask
    if settings["recipe"] == "rloo_cispo":
        adv = groups_of(inputs, dtype, advantages.leave_one_out)
    elif settings["recipe"] == "dapo":
        _, keep = kept_rows(inputs["rewards"], columns(inputs, dtype)["groups"])
        penalty = returns.soft_overlong(
            mask.sum(1).to(dtype), max_tokens=settings["overlong_max_length"], cache_tokens=settings["overlong_cache"]
        )
        rewards = {**inputs, "rewards": (torch.tensor(inputs["rewards"], dtype=dtype) + penalty).tolist()}
        adv = masked(groups_of(rewards, dtype, group_advantage(settings)), keep)
        mask, extra = mask & keep[:, None], {"keep": keep}
    else:
        adv = groups_of(inputs, dtype, group_advantage({"ddof": 1, "eps": None, **settings}))
    total = reducer(settings["agg"], mask)
    args = {"logp_cur": c.cur, "logp_prox": c["old_logprobs"], "adv": masked(adv[:, None].expand(mask.shape), mask)}
    if settings["recipe"] == "rloo_cispo":
        loss = policy_losses.cispo(**args, **pick(settings, "ratio_min", "ratio_max"))
    else:
        loss = policy_losses.ppo_clip(**args, **pick(settings, "eps_low", "eps_high"))
    loss = total(loss, mask)
    if settings.get("kl_coef"):
        kl = penalties.kl_loss(c.cur, c["old_logprobs"], c["ref_logprobs"], estimator=settings["kl_estimator"], gradient="naive")
        loss = loss + settings["kl_coef"] * total(kl, mask)
    return {"advantages": adv, "loss": loss, "grad_logprobs": c.grad(loss), **extra}


ADAPTERS = {
    fn.__name__: fn for fn in (
        adv_gae, adv_gdpo, adv_gpg, adv_grpo, adv_opo, adv_reinforce, adv_reinforce_pp, adv_reinforce_pp_baseline, adv_remax, adv_rloo,
        adv_whiten, dapo_dynamic_sampling, dapo_overlong, dapo_overlong_filter, end_to_end, reward_kl_shaping,
    )
}
