"""A transformer with random weights and a tokenizer of single characters."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from burnish.config import Scratch
from burnish.models.records import ModelError, first_line, nearest

PAD, END = "<pad>", "<end>"
_SET_BY_ALPHABET = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")


def build(scratch: Scratch, *, seed: int, outputs: int | None = None) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """Module and tokenizer. The same seed gives the same weights; the global random state is left alone.

    outputs: numbers of a head that is 0 at first, in place of the next token's.
    """
    tokenizer = build_tokenizer(scratch.alphabet)
    config = build_config(scratch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return from_config(config, outputs=outputs), tokenizer


def from_config(config: PreTrainedConfig, *, outputs: int | None = None) -> torch.nn.Module:
    """A float32 module with random weights, on the device of the surrounding torch.device context."""
    try:
        if outputs is None:
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        config.num_labels = outputs
        module = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, trust_remote_code=False)
        torch.nn.init.zeros_(module.score.weight)
        return module
    except MemoryError:
        raise
    except Exception as error:
        raise ModelError(
            f"transformers builds no causal language model from this configuration of {config.model_type}: {first_line(error)}"
        ) from error


def build_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """<pad> is 0, <end> is 1, then the characters in their order. A character outside the alphabet does not encode."""
    if not alphabet:
        raise ModelError("model.scratch.alphabet is empty; give the characters of the tasks, as alphabet: '0123456789+='")
    if twice := sorted({c for c in alphabet if alphabet.count(c) > 1}):
        raise ModelError(f"model.scratch.alphabet holds {twice} more than once; each character is one token")
    vocab = {token: i for i, token in enumerate((PAD, END, *alphabet))}
    backend = Tokenizer(models.WordLevel(vocab))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False)


def build_config(scratch: Scratch) -> PreTrainedConfig:
    """The configuration of the architecture. An unknown key or a wrong type raises ModelError."""
    if scratch.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = nearest(scratch.model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise ModelError(f"model.scratch.model_type: transformers has no causal language model {scratch.model_type!r}{hint}")
    _refuse_unknown(scratch.model_type, scratch.config)
    values = {**scratch.config, "vocab_size": len(scratch.alphabet) + 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    try:
        return AutoConfig.for_model(scratch.model_type, **values)
    except Exception as error:
        raise ModelError(f"model.scratch.config does not suit {scratch.model_type}: {first_line(error)}") from error


def _refuse_unknown(model_type: str, config: dict[str, Any]) -> None:
    if given := [key for key in _SET_BY_ALPHABET if key in config]:
        raise ModelError(f"model.scratch.config: {given} follow from model.scratch.alphabet; remove them")
    names = _config_names(model_type)
    if unknown := [key for key in config if key not in names]:
        hint = nearest(unknown[0], names)
        raise ModelError(f"model.scratch.config: {model_type} has no {unknown}{hint}; it takes {sorted(names)}")


def _config_names(model_type: str) -> set[str]:
    """Declared fields, their other names, and what the model's code reads: some configurations leave out a field, as head_dim."""
    cls = CONFIG_MAPPING[model_type]
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    names = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    code = inspect.getsource(inspect.getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[cls]))
    names |= {a or b for a, b in re.findall(r"\bconfig\.([a-z]\w*)|\bgetattr\((?:self\.)?config, \"([a-z]\w*)\"", code)}
    return names - common - set(_SET_BY_ALPHABET)
