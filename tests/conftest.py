"""Tiny models that several tests share. They are made in well under a second on a CPU."""

from __future__ import annotations

import os
import string
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")      # a test that reaches for the network should fail at once

import pytest
import torch

from burnish.api.session import Session
from burnish.config import Lora, Model, Scratch
from burnish.models.load import Loaded, load
from burnish.monitor.metrics import metric

ALPHABET = string.digits + string.ascii_letters + " \n+-*/=?.,:;"

_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
TINY = {
    "llama": ("llama", {**_SMALL, "tie_word_embeddings": False}),
    "llama_tied": ("llama", {**_SMALL, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**_SMALL, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {**_SMALL, "head_dim": 16, "sliding_window": 8}),
    "mixtral": ("mixtral", {**_SMALL, "num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", {**_SMALL, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
}


def tiny_settings(name: str, *, lora: Lora | None = None, **changes) -> Model:
    model_type, config = TINY[name]
    return Model(scratch=Scratch(alphabet=ALPHABET, model_type=model_type, config={**config, **changes}), lora=lora)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_tiny():
    """make_tiny(name, seed=0, lora=None, **config changes) -> Loaded, a fresh model of its own. Names are the keys of TINY."""

    def make(name: str = "llama", *, seed: int = 0, lora: Lora | None = None, **changes) -> Loaded:
        return load(tiny_settings(name, lora=lora, **changes), seed=seed)

    return make


@pytest.fixture(scope="session")
def tiny_llama(make_tiny) -> Loaded:
    """Shared by the whole session: read it, do not train it. A test that changes weights calls make_tiny."""
    return make_tiny("llama")


@pytest.fixture(autouse=True)
def _own_module_path(monkeypatch):
    """A reference adds the working folder to the module path, which must not reach the next test."""
    monkeypatch.setattr("sys.path", [*sys.path])


@pytest.fixture(autouse=True)
def _every_metric_is_declared(monkeypatch):
    """Of every run in a test: a metric without a declaration ends it."""
    log = Session.log

    def checked(self, step, metrics, rates=None):
        for name in metrics:
            metric(name)
        log(self, step, metrics, rates)

    monkeypatch.setattr(Session, "log", checked)
