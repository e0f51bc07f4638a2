"""A finished module to a folder that plain transformers loads, with equal logits or scores, and that stops where training stopped."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from burnish.models.files import quiet, share
from burnish.models.records import ModelError


def export(module: torch.nn.Module, tokenizer: Any, folder: Path | str, *, end_token_ids: Sequence[int], stop: Sequence[str]) -> None:
    """Write weights, configuration, tokenizer with its chat template, and a generation config: greedy, with these ends.

    LoRA is merged, one layer at a time, in copies: `module` stays as it is, bit for bit. Weights keep their precision; where a module
    mixes precisions all are written as float32. The folder appears at once and complete; one that holds a model is replaced.
    A model of scores takes no generation config, and the thresholds of its classes stand in its configuration.
    Raises ModelError for a folder that holds something else, OSError when the disk refuses.
    """
    folder = Path(folder).absolute()
    if folder.exists() and not (folder / "config.json").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} exists and holds no model; give a new folder, or one that holds a model to replace")
    state = merged_state(module)
    writer = copy.copy(_base(module))      # shares the weights; only its two configurations are its own
    writer.config = copy.deepcopy(writer.config)
    writer.config.eos_token_id = _one_or_list(end_token_ids)
    if _breaks_ties(writer, state):
        writer.config.tie_word_embeddings = False
    if writer.can_generate():
        writer.generation_config = generation_config(tokenizer, end_token_ids=end_token_ids, stop=stop)
    if (thresholds := getattr(writer, "thresholds", None)) is not None:
        writer.config.thresholds = thresholds().tolist()

    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        state, dtype = _one_precision(state)
        with quiet():
            writer.save_pretrained(unfinished, state_dict=state)
        writer.config.dtype = dtype
        writer.config.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        share(unfinished)
        _replace(folder, unfinished)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def generation_config(tokenizer: Any, *, end_token_ids: Sequence[int], stop: Sequence[str]) -> GenerationConfig:
    """Greedy, ends at exactly these tokens and texts; nothing is taken over from the model training began with.

    A stop text of one character becomes the tokens that hold it, so that `generate` and pipelines need no more than the folder.
    With longer ones `generate` wants its tokenizer as an argument, and says so.
    """
    end_token_ids = [*end_token_ids, *(i for i in _tokens_with([s for s in stop if len(s) == 1], tokenizer) if i not in end_token_ids)]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(end_token_ids), None)
    return GenerationConfig(
        do_sample=False,
        eos_token_id=list(end_token_ids) or None,
        pad_token_id=pad,
        bos_token_id=tokenizer.bos_token_id,
        stop_strings=[s for s in stop if len(s) > 1] or None,
    )


def _tokens_with(characters: Sequence[str], tokenizer: Any) -> list[int]:
    if not characters:
        return []
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], clean_up_tokenization_spaces=False)
    return [i for i, text in enumerate(texts) if any(c in text for c in characters)]


def merged_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights by the names of the plain architecture, LoRA merged in, without a value head and thresholds. Weights that no adapter
    touches are not copied.
    """
    base = _base(module)
    layers = _adapted_layers(base) if base is not module else {}
    wrapped = _trained_whole(base) if base is not module else {}
    inside = ("value_head.", "thresholds.", *(f"{name}." for name in (*layers, *wrapped)))
    state = {name: tensor for name, tensor in base.state_dict().items() if not name.startswith(inside)}
    for name, part in wrapped.items():
        state |= {f"{name}.{weight}": tensor for weight, tensor in part.modules_to_save[part.active_adapters[0]].state_dict().items()}
    for name, layer in layers.items():
        twin = copy.deepcopy(layer).float()      # in bfloat16 most of a small change would be rounded away
        for part in _adapters_in(twin).values():
            part.merge(safe_merge=True)
        now = layer.get_base_layer().state_dict()
        for weight, merged in twin.get_base_layer().state_dict().items():
            state[f"{name}.{weight}"] = now[weight] if torch.equal(merged, now[weight].float()) else merged.cpu()
    return state


def _base(module: torch.nn.Module) -> torch.nn.Module:
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def _adapted_layers(base: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Outermost adapters by name; those on the expert stacks of a mixture stand one inside the other."""
    found = _adapters_in(base)
    return {name: layer for name, layer in found.items() if not any(name.startswith(f"{other}.") for other in found)}


def _adapters_in(part: torch.nn.Module) -> dict[str, torch.nn.Module]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: layer for name, layer in part.named_modules() if isinstance(layer, BaseTunerLayer)}


def _trained_whole(base: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules that peft trains beside the adapters, as the head of a model of scores, by name."""
    from peft.utils.other import ModulesToSaveWrapper

    return {name: part for name, part in base.named_modules() if isinstance(part, ModulesToSaveWrapper)}


def _breaks_ties(base: torch.nn.Module, state: dict[str, torch.Tensor]) -> bool:
    """An adapter on one of two tied weights makes them differ once merged."""
    ties = base.all_tied_weights_keys.items()
    return any(not torch.equal(state[a], state[b].to(state[a].device)) for a, b in ties if a in state and b in state)


def _one_precision(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.dtype]:
    found = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(found) == 1:
        return state, found.pop()
    return {name: t.float() if t.is_floating_point() else t for name, t in state.items()}, torch.float32


def _one_or_list(ids: Sequence[int]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _replace(folder: Path, by: Path) -> None:
    if not folder.exists():
        by.rename(folder)
        return
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    folder.rename(replaced)
    by.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
