"""What all golden adapters share: the inputs as the trainer hands them over, and our reductions by the vectors' names."""

from __future__ import annotations

import torch

from burnish.algorithms import reduce
from burnish.algorithms.reduce import masked


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
