"""What vLLM's workers do for the trainer: take its weights, whole or not at all, and say which they have.

vLLM mixes the class into its own worker (--worker-extension-cls). All calls go to all workers, with texts as arguments.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.engines.vllm import weights

OWNER = "BURNISH_OWNER_PID"
TORN = -1


class WeightsFromTrainer:
    burnish_version: int | None = 0        # TORN: a load broke off, the weights are neither the old nor the new
    burnish_ready: tuple[int, dict[str, Tensor]] | None = None
    burnish_shapes: dict[str, list[int]] | None = None

    def burnish_about(self) -> dict[str, Any]:
        """Called before the first load, while the model's folder is still there."""
        self.burnish_shapes = self.burnish_shapes or weights.shapes_in(self.vllm_config.model_config.model)
        config = self.vllm_config.model_config
        return {
            "version": self.burnish_version, "logprobs_mode": str(config.logprobs_mode), "context_tokens": config.max_model_len,
            "dtype": str(config.dtype).removeprefix("torch."), "model": str(config.model),
            "vocabulary": config.get_vocab_size(),
        }

    def burnish_read(self, folder: str, version: str) -> dict[str, Any]:
        """First half of a load: the weights are in memory and checked, the model still has the old ones."""
        try:
            return self.burnish_prepare(weights.read(Path(folder), int(version)), version)
        except weights.Damaged as error:
            return {"error": str(error)}

    def burnish_prepare(self, tensors: Mapping[str, Tensor], version: str) -> dict[str, Any]:
        """As burnish_read, with weights of the same process."""
        self.burnish_ready = None
        try:
            kept = weights.fitted(tensors, self.burnish_shapes)
        except weights.Damaged as error:
            return {"error": str(error)}
        self.burnish_ready = int(version), kept
        return {"error": None}

    def burnish_take(self) -> dict[str, Any]:
        """Second half, when all workers have the weights: they become the model's."""
        version, tensors = self.burnish_ready
        self.burnish_ready, self.burnish_version = None, TORN
        try:
            self.model_runner.reload_weights(weights_iterator=iter(tensors.items()), is_checkpoint_format=True)
            _pack_tied(self.model_runner.get_model())
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        self.burnish_version = version
        return {"error": None, "version": version}

    def burnish_drop(self) -> None:
        self.burnish_ready = None


def _pack_tied(model: torch.nn.Module) -> None:
    """On a CPU vLLM multiplies by packed copies of weights; it packs a tied output layer anew only where its own name is loaded."""
    users: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if weight.device.type == "cpu" and weight.numel():
                users.setdefault(weight.data_ptr(), []).append(module)
    for tied in users.values():
        for module in tied if len(tied) > 1 else ():
            module.quant_method.process_weights_after_loading(module)


def _end_with(owner: int) -> None:
    """Ends this process group when the process `owner` is gone, so that no server outlives a trainer that was killed."""
    while Path(f"/proc/{owner}").exists():
        time.sleep(2)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(10)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if OWNER in os.environ and os.path.isdir("/proc/self"):
    threading.Thread(target=_end_with, args=(int(os.environ[OWNER]),), daemon=True).start()
