"""What training changes: weights, Adam's moments, counters, controllers. All of it is saved and comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from burnish.engines.base import Engine
from burnish.models.export import merged_state
from burnish.models.policy import Policy
from burnish.trainer.optim import adamw
from burnish.trainer.precision import Weights


@dataclass(slots=True)
class TrainState:
    """Made by make_state; changed by train_step only."""

    policy: Any                    # a models.policy.Policy or models.heads.Scorer
    weights: Weights
    optimizer: torch.optim.Optimizer
    step: int = 0                  # steps finished
    updates: int = 0               # optimizer updates tried, skipped ones included
    skipped: int = 0               # updates skipped because something was not finite
    skipped_in_a_row: int = 0
    version: int = 0               # of the weights; one more with each update that moved them

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """File name -> tensors by parameter name."""
        names = {id(m): name for name, m in self.weights.masters.items()}
        moments = {
            f"{names[id(master)]}/{key}": value
            for master, entry in self.optimizer.state.items()
            for key, value in entry.items()
        }
        return {"weights": {n: m.detach() for n, m in self.weights.masters.items()}, "adam": moments}

    def numbers(self) -> dict[str, Any]:
        return {
            "step": self.step, "updates": self.updates, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row,
            "version": self.version,
        }

    def restore(self, tensors: dict[str, dict[str, Tensor]], numbers: dict[str, Any]) -> None:
        self.weights.load(tensors["weights"])
        masters = self.weights.masters
        self.optimizer.state.clear()
        for key, value in tensors["adam"].items():
            name, _, moment = key.rpartition("/")
            master = masters[name]
            entry = self.optimizer.state[master]
            entry[moment] = value.to(master.device, copy=True)
        for name in ("step", "updates", "skipped", "skipped_in_a_row", "version"):
            setattr(self, name, numbers[name])


def make_state(
    module: nn.Module, *, dtype: str = "float32", betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0,
    kind: Callable[[nn.Module], Any] = Policy,
) -> TrainState:
    """A model made ready to train: on the accelerator where there is one, computing in `dtype`, with AdamW on float32 weights.

    kind: Policy for a causal LM, models.heads.Scorer for a critic or reward model.
    """
    module.to(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    weights = Weights(module, dtype=dtype)
    return TrainState(kind(module), weights, adamw(weights, betas=betas, eps=eps, weight_decay=weight_decay))


def publish(state: TrainState, engine: Engine) -> None:
    """The weights as they are now are what `engine` samples from next."""
    engine.load(state.version, None if engine.abilities.shares_weights else merged_state(state.policy.module).items())
