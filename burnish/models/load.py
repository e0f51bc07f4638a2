"""load: settings of a model to a module ready to train. inspect: what can be known of it without its weights."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging

from burnish.config import Model
from burnish.models import gguf, scratch
from burnish.models.adapters import add_lora
from burnish.models.files import quiet
from burnish.models.records import Facts, Loaded, ModelError, first_line, nearest

__all__ = ["Facts", "Loaded", "ModelError", "inspect", "load", "load_scorer", "load_tokenizer"]

UNBOUNDED_TOKENS = 1 << 20      # context of a model that names no limit, such as one without positions
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
_DROPOUT_NAME = re.compile(r"dropout|pdrop|drop_prob|layerdrop|jitter")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_PATHS = "a folder with config.json and *.safetensors, a hub name as owner/name, a .gguf file, or package:NAME or package:NAME/FOLDER"


def load(model: Model, *, seed: int, cache_dir: Path | None = None) -> Loaded:
    """The model of these settings with float32 parameters, those that should train with requires_grad.

    `seed` draws the weights of a scratch model and of LoRA; `cache_dir` holds dequantised GGUF files (BURNISH_CACHE, else
    ~/.cache/burnish). Dropout and router noise of the architecture are off, also in train mode; LoRA's own dropout stays.
    Raises ModelError. Runs no code from a model's folder.
    """
    with quiet():
        if model.scratch is not None:
            module, tokenizer = scratch.build(model.scratch, seed=seed)
            source = f"scratch {model.scratch.model_type}"
        else:
            where, source = _find(model.path)
            if isinstance(where, Path) and where.is_file():
                where = gguf.convert(where, cache_dir=cache_dir)
                source = f"{source} ({where.name})"
            module, tokenizer = _load_pretrained(where), _load_tokenizer(where)
        context = _context_tokens(module.config, tokenizer)
        _silence_dropout(module)
        if model.lora is not None:
            module = add_lora(module, model.lora, seed=seed)
    return Loaded(module.eval(), tokenizer, context, source)


def load_scorer(model: Model, *, seed: int, outputs: int | None = 1, cache_dir: Path | None = None) -> Loaded:
    """As load, with a linear head of `outputs` numbers in place of the next token's: a critic, or a reward model.

    The head is 0 where the model brings none, so that every first score is 0. The body is that of a causal language model, or of a
    folder that a reward model was exported to. outputs None: those that the model has; ModelError where it has no such head.
    """
    with quiet():
        if model.scratch is not None:
            module, tokenizer = scratch.build(model.scratch, seed=seed, outputs=outputs or 1)
            source = f"scratch {model.scratch.model_type}"
        else:
            where, source = _find(model.path)
            if isinstance(where, Path) and where.is_file():
                where = gguf.convert(where, cache_dir=cache_dir)
                source = f"{source} ({where.name})"
            module, tokenizer = _load_pretrained(where, scorer=True, outputs=outputs), _load_tokenizer(where)
        context = _context_tokens(module.config, tokenizer)
        _silence_dropout(module)
        if model.lora is not None:
            module = add_lora(module, model.lora, seed=seed, task_type="SEQ_CLS")
    return Loaded(module.eval(), tokenizer, context, source)


def inspect(model: Model, *, cache_dir: Path | None = None) -> Facts:
    """Facts of the model of these settings; reads no weights. Raises ModelError for what `load` would refuse, as far as is seen."""
    with quiet():
        if model.scratch is not None:
            config, tokenizer = scratch.build_config(model.scratch), scratch.build_tokenizer(model.scratch.alphabet)
            return _facts(config, tokenizer, f"scratch {model.scratch.model_type}")
        where, source = _find(model.path)
        if isinstance(where, Path) and where.is_file():
            folder = gguf.cache_folder(where, cache_dir)
            if not folder.is_dir():
                return gguf.facts(where, source=source)
            where = folder
        return _facts(_load_config(where), _load_tokenizer(where), source)


def load_tokenizer(model: Model, *, cache_dir: Path | None = None) -> Any | None:
    """The tokenizer alone; None for a GGUF file that is not in the cache yet, where it would take most of a minute."""
    with quiet():
        if model.scratch is not None:
            return scratch.build_tokenizer(model.scratch.alphabet)
        where, _ = _find(model.path)
        if isinstance(where, Path) and where.is_file():
            where = gguf.cache_folder(where, cache_dir)
            if not where.is_dir():
                return None
        return _load_tokenizer(where)


def _facts(config: PreTrainedConfig, tokenizer: Any, source: str) -> Facts:
    with torch.device("meta"):
        skeleton = scratch.from_config(config)
    return Facts(
        context_tokens=_context_tokens(config, tokenizer),
        vocab_size=config.get_text_config(decoder=True).vocab_size,
        num_parameters=sum(p.numel() for p in skeleton.parameters()),
        end_token=tokenizer.eos_token,
        has_chat_template=bool(tokenizer.chat_template),
        source=source,
        outputs=config.num_labels if any("ForSequenceClassification" in a for a in config.architectures or ()) else None,
    )


def _context_tokens(config: PreTrainedConfig, tokenizer: Any) -> int:
    text = config.get_text_config(decoder=True)
    for name in _CONTEXT_NAMES:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return min(tokenizer.model_max_length, UNBOUNDED_TOKENS)


def _silence_dropout(module: torch.nn.Module) -> None:
    # Train mode is needed by gradient checkpointing, and must compute what the sampler computed.
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and _DROPOUT_NAME.search(name):
                setattr(part, name, 0.0)


def _find(path: str) -> tuple[Path | str, str]:
    """Where the model lies (a file, a folder or a hub name), checked, and how to call it."""
    if path.startswith("package:") and "/" in path:
        folder = _inside_package(path)
        _check_folder(folder)
        return folder, path
    if path.startswith("package:"):
        file = gguf.find_in_package(path.removeprefix("package:"))
        return file, f"{path}/{file.name}"
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix != ".gguf":
            raise ModelError(f"model.path {path} is a file, but no .gguf file; give {_PATHS}")
        return place, path
    if place.is_dir():
        _check_folder(place)
        return place, path
    if place.suffix == ".gguf" or path.startswith(".") or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        missing = next(p for p in (place.absolute(), *place.absolute().parents) if p.parent.is_dir())
        hint = nearest(missing.name, (p.name for p in missing.parent.iterdir()))
        raise ModelError(f"model.path {path}: there is no {missing.name!r} in {missing.parent}{hint}; give {_PATHS}")
    return _find_on_hub(path), path


def _inside_package(path: str) -> Path:
    """The folder that package:NAME/FOLDER names; NAME is what one would import."""
    name, _, inside = path.removeprefix("package:").partition("/")
    try:
        found = importlib.util.find_spec(name).submodule_search_locations[0]
    except (AttributeError, TypeError, ValueError, ModuleNotFoundError):
        raise ModelError(f"model.path {path}: there is no package {name!r} to import; give {_PATHS}") from None
    if not (folder := Path(found, inside)).is_dir():
        raise ModelError(f"model.path {path}: there is no folder {inside!r} in {found}; give {_PATHS}")
    return folder


def _find_on_hub(name: str) -> Path | str:
    """The name, or without network the folder of the hub's cache. Asks once: from_pretrained would retry for half a minute a file."""
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
        return name
    except GatedRepoError as error:
        raise ModelError(f"model.path {name}: the hub wants you to accept its licence and log in first (hf auth login)") from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise ModelError(f"model.path {name}: neither a folder here nor a model on the hub ({first_line(error)}); give {_PATHS}") from error
    except Exception as unreached:   # whatever the HTTP library of the day raises when there is no network
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except Exception as error:
            raise ModelError(
                f"model.path {name}: no such folder here, not in the hub's cache, and the hub cannot be reached "
                f"({first_line(unreached)}); give {_PATHS}"
            ) from error
    _check_folder(folder)
    return folder


def _check_folder(folder: Path) -> None:
    held = sorted(p.name for p in folder.iterdir())
    if "config.json" not in held:
        hint = "it is a LoRA adapter: merge it into its base model first" if "adapter_config.json" in held else f"give {_PATHS}"
        raise ModelError(f"{folder} has no config.json; it holds {held[:10] or 'nothing'}; {hint}")
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is no valid JSON: {first_line(error)}") from error
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        raise ModelError(
            f"{folder} holds weights quantised by {method}, which cannot be trained; give the model in full precision, or a .gguf file"
        )
    if "model.safetensors.index.json" in held:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        shards = sorted(set(index["weight_map"].values()))
        if missing := [name for name in shards if name not in held]:
            raise ModelError(f"{folder} lacks the weights {missing} that its index names; download them again")
    elif "model.safetensors" in held:
        shards = ["model.safetensors"]
    else:
        pickled = any(name.endswith(".bin") for name in held)
        hint = "*.bin files are pickles, which burnish does not read; load them in transformers and call save_pretrained" if pickled else (
            "put model.safetensors beside config.json"
        )
        raise ModelError(f"{folder} has a config.json but no weights (model.safetensors); it holds {held[:10]}; {hint}")
    for name in shards:
        _check_shard(folder / name)
    if not any(name in held for name in _TOKENIZER_FILES):
        raise ModelError(f"{folder} has no tokenizer; it holds {held[:10]}; put the model's tokenizer.json and tokenizer_config.json there")


def _check_shard(file: Path) -> None:
    try:
        with safe_open(file, framework="pt"):     # checks the header against the size of the file, reads no weights
            pass
    except Exception as error:
        with file.open("rb") as stream:
            pointer = stream.read(20).startswith(b"version https://git")
        what = "is a Git LFS pointer, not the weights: run git lfs pull" if pointer else "ends too early or is damaged: download it again"
        raise ModelError(f"{file} ({file.stat().st_size} bytes) {what} ({first_line(error)})") from error


def _load_config(where: Path | str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(where, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"transformers cannot read the configuration of {where}: {first_line(error)}") from error


def _load_tokenizer(where: Path | str) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"transformers cannot read the tokenizer of {where}: {first_line(error)}") from error
    if len(tokenizer) == 0:
        raise ModelError(f"the tokenizer of {where} has no tokens; put the tokenizer.json of the model there")
    return tokenizer


def _load_pretrained(where: Path | str, *, scorer: bool = False, outputs: int | None = None) -> torch.nn.Module:
    """A causal language model, or the same body under a head of `outputs` numbers, or of as many as the model has."""
    config, what = _load_config(where), "a body for scores" if scorer else "a causal language model"
    kind = AutoModelForSequenceClassification if scorer else AutoModelForCausalLM
    if outputs is not None:
        config.num_labels = outputs
    shown = logging.get_verbosity()
    logging.set_verbosity_error()      # it would report the missing weights that are looked at below
    try:
        module, info = kind.from_pretrained(
            where, config=config, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except MemoryError:
        raise
    except Exception as error:
        raise ModelError(f"transformers cannot load {where} as {what}: {first_line(error)}") from error
    finally:
        logging.set_verbosity(shown)
    missing = sorted(info["missing_keys"])
    if outputs is not None and "score.weight" in missing:
        missing.remove("score.weight")
        torch.nn.init.zeros_(module.score.weight)
    if missing:
        like = "a reward model" if scorer and outputs is None else "a causal language model"
        raise ModelError(
            f"{where} lacks {len(missing)} weights of {type(module).__name__}, as {missing[:3]}; transformers would fill them with "
            f"random numbers. Give the folder of {like} whose config.json belongs to its weights"
        )
    # The weights are views of the mapped file, at odd addresses: slower, and sums may differ in their last bit from aligned ones.
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    return module
