"""What the model computes in and what is trained: float32 weights always, with a bfloat16 copy as the module's own where asked."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Weights:
    """The trainable weights in float32 ("masters") and their gradients, summed over micro-batches in float32.

    In float32 the masters are the module's parameters. In bfloat16 the module's parameters are the rounded copy;
    buffers such as rotary frequencies stay as they are.
    """

    def __init__(self, module: nn.Module, *, dtype: str) -> None:
        self.module = module
        self.params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.params:
            raise ValueError("the model has no trainable parameter")
        compute = DTYPES[dtype]
        self.rounded = compute is not torch.float32
        if self.rounded:
            self.masters = {name: p.detach().float().clone() for name, p in self.params.items()}
            for p in module.parameters():
                p.data = p.data.to(compute)
        else:
            self.masters = dict(self.params)

    def collect_grads(self) -> None:
        """After each backward: add the module's gradients to the masters' and clear them."""
        if not self.rounded:
            return
        for name, p in self.params.items():
            if p.grad is None:
                continue
            master = self.masters[name]
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad += p.grad
            p.grad = None

    def clear_grads(self) -> None:
        for p in (*self.params.values(), *self.masters.values()):
            p.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Masters -> the module that computes."""
        if self.rounded:
            for name, p in self.params.items():
                p.copy_(self.masters[name])

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        if missing := sorted(self.masters.keys() ^ tensors.keys()):
            raise ValueError(f"the saved weights and the model do not have the same parameters; first difference: {missing[0]}")
        for name, master in self.masters.items():
            if master.shape != tensors[name].shape:
                raise ValueError(f"{name}: saved shape {tuple(tensors[name].shape)}, the model has {tuple(master.shape)}")
            master.copy_(tensors[name])
        self.publish()

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Length of the whole gradient. -> []"""
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        return torch.nn.utils.get_total_norm(grads)
