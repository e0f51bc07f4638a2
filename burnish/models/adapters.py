"""LoRA (arXiv:2106.09685) through peft."""

from __future__ import annotations

import torch

from burnish.config import Lora
from burnish.models.records import ModelError, first_line, nearest


def add_lora(module: torch.nn.Module, lora: Lora, *, seed: int, task_type: str = "CAUSAL_LM") -> torch.nn.Module:
    """The module wrapped in a PeftModel: base frozen, adapters trainable, the same seed gives the same adapters.

    task_type SEQ_CLS keeps a head of scores trainable too.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ModelError("model.lora needs peft; install it with: pip install 'burnish[lora]'") from error
    linear = _linear_names(module)
    if not isinstance(lora.targets, str):
        names = [name for name, _ in module.named_modules()]
        if missing := [t for t in lora.targets if not any(n == t or n.endswith(f".{t}") for n in names)]:
            hint = nearest(missing[0], linear)
            raise ModelError(f"model.lora.targets: the model has no module {missing}{hint}; its linear layers are {linear}")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        task_type=task_type,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return get_peft_model(module, config)
    except ValueError as error:
        if "lora_dropout" in str(error):
            raise ModelError(f"model.lora.dropout {lora.dropout}: the experts of this model take no LoRA dropout; set it to 0") from error
        raise ModelError(f"model.lora.targets {lora.targets!r}: {first_line(error)}; the model's linear layers are {linear}") from error


def _linear_names(module: torch.nn.Module) -> list[str]:
    """Last parts of the names of all linear layers; Conv1D is how the GPT-2 family spells Linear."""
    kinds = ("Linear", "Conv1D")
    return sorted({name.rpartition(".")[2] for name, part in module.named_modules() if type(part).__name__ in kinds})
