"""Golden adapters of reward models, ensembles and running normalisation, best of n."""

from __future__ import annotations

import torch
from golden_common import reducer

from burnish.algorithms import best_of_n, ensembles, reward_losses, running
from burnish.evaluate.measure import pass_at_k


def batch_mean(value, mask=None):
    mask = torch.ones_like(value, dtype=torch.bool) if mask is None else mask
    return reducer({"mode": "token-mean"}, mask)(value, mask)


def leaf(value, dtype):
    return torch.tensor(value, dtype=dtype, requires_grad=True)


def numbers(values):
    return torch.tensor(values, dtype=torch.float64)


def reward_bradley_terry(settings, inputs, dtype):
    chosen, rejected = leaf(inputs["chosen_rewards"], dtype), leaf(inputs["rejected_rewards"], dtype)
    margin = torch.tensor(inputs["margin"], dtype=dtype) if settings["use_margin"] else None
    loss = batch_mean(reward_losses.bradley_terry(chosen, rejected, margin=margin))
    loss = loss + settings["center_coef"] * batch_mean(reward_losses.centering(chosen, rejected))
    grad = torch.autograd.grad(loss, (chosen, rejected))
    accuracy = batch_mean(reward_losses.prefers_chosen(chosen, rejected).to(dtype))
    return {"loss": loss, "grad_chosen": grad[0], "grad_rejected": grad[1], "accuracy": accuracy}


def reward_regression(settings, inputs, dtype):
    score, mask = leaf(inputs["predictions"], dtype), torch.tensor(inputs["mask"]).bool()
    loss = batch_mean(reward_losses.squared_error(score, torch.tensor(inputs["targets"], dtype=dtype), mask), mask)
    return {"loss": loss, "grad_predictions": torch.autograd.grad(loss, score)[0]}


def reward_ordinal(settings, inputs, dtype):
    score, thresholds = leaf(inputs["scores"], dtype), leaf(inputs["thresholds"], dtype)
    loss = batch_mean(reward_losses.ordinal(score, torch.tensor(inputs["labels"]), thresholds))
    grad = torch.autograd.grad(loss, (score, thresholds))
    return {"loss": loss, "grad_scores": grad[0], "grad_thresholds": grad[1]}


def prm_loss(settings, inputs, dtype):
    logits, label = leaf(inputs["logits"], dtype), torch.tensor(inputs["labels"])
    mode = {"token_mean": "token-mean", "example_mean": "seq-mean-token-mean"}[settings["normalization"]]
    per_step = reward_losses.step_cross_entropy(logits, label, ignore_label=settings["ignore_index"])
    mask = label != settings["ignore_index"]
    loss = reducer({"mode": mode}, mask)(per_step, mask)
    return {"loss": loss, "grad_logits": torch.autograd.grad(loss, logits)[0]}


def best_of_n_(settings, inputs, dtype):
    reward, correct = torch.tensor(inputs["rewards"], dtype=dtype), torch.tensor(inputs["correct"])
    best = best_of_n.best_index(reward)
    sizes = [n for n in (1, 2, 4, 8) if n <= reward.shape[-1]]
    pass_at = {str(k): numbers([pass_at_k(len(row), int(row.sum()), k) for row in correct]) for k in sizes}
    return {
        "best_index": best, "best_reward": reward.gather(-1, best[:, None]).squeeze(-1),
        "pass_at_k": pass_at, "expected_max_of_n": {str(n): best_of_n.expected_max(reward, n=n) for n in sizes},
    }


def reward_ensemble(settings, inputs, dtype):
    score = torch.tensor(inputs["member_rewards"], dtype=dtype).T
    assert settings["ddof"] == 0
    return {
        "mean": ensembles.mean(score), "min": ensembles.minimum(score), "median": ensembles.median(score),
        "uncertainty_weighted": ensembles.mean_minus_variance(score, coef=settings["variance_coef"]),
        "mean_minus_std": ensembles.mean_minus_std(score, coef=settings["std_coef"]),
        "weighted_mean": ensembles.weighted_mean(score, weights=settings["weights"]),
    }


def reward_running_norm(settings, inputs, dtype):
    assert settings["update_before_normalize"]
    norm = running.RunningNorm(eps=settings["eps"], ddof=settings["ddof"], center=settings["center"])
    normalized, mean, var = [], [], []
    for batch in inputs["batches"]:
        normalized.append(norm(torch.tensor(batch, dtype=dtype)))
        mean.append(norm.mean)
        var.append(norm.var)
    return {"normalized": normalized, "mean_after_each": numbers(mean), "var_after_each": numbers(var)}


def reward_ema_norm(settings, inputs, dtype):
    assert settings["init"] == "first batch"
    norm = running.EmaNorm(decay=settings["decay"], eps=1e-8, ddof=settings["ddof"])
    mean, var = [], []
    for batch in inputs["batches"]:
        norm.update(torch.tensor(batch, dtype=dtype))
        mean.append(norm.mean)
        var.append(norm.var)
    return {"mean_after_each": numbers(mean), "var_after_each": numbers(var)}


ADAPTERS = {
    "reward_bradley_terry": reward_bradley_terry, "reward_regression": reward_regression, "reward_ordinal": reward_ordinal,
    "prm_loss": prm_loss, "best_of_n": best_of_n_, "reward_ensemble": reward_ensemble, "reward_running_norm": reward_running_norm,
    "reward_ema_norm": reward_ema_norm,
}
