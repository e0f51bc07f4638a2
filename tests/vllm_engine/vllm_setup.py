"""Tiny models in folders, and vLLM over them: once inside of this process, once as a server."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from burnish.engines.vllm import VllmEngine
from burnish.models.export import export

SIZE = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
VALUES = {
    "dtype": "float32", "context_tokens": 448,
    "options": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 32, "disable_log_stats": True},
}
OPINIONS = {"do_sample": True, "temperature": 0.1, "top_k": 1, "repetition_penalty": 3.0, "max_new_tokens": 2, "eos_token_id": [5, 6, 7, 8]}
"""Settings of the model's own that must not be heeded."""


@pytest.fixture(scope="session")
def make_sharp(make_tiny):
    """make_sharp(name, seed=0) -> Loaded: a random model with larger logits, so that filters and temperatures matter."""

    def make(name, *, seed=0):
        loaded = make_tiny(name, seed=seed, **SIZE)
        with torch.no_grad():
            loaded.module.get_output_embeddings().weight.mul_(1.5 if name == "llama_tied" else 6)
        return loaded

    return make


@pytest.fixture(scope="session")
def folder_of(make_sharp, tmp_path_factory):
    def folder(name):
        loaded = make_sharp(name)
        place = tmp_path_factory.mktemp(name) / "model"
        export(loaded.module, loaded.tokenizer, place, end_token_ids=[1], stop=[])
        (place / "generation_config.json").write_text(json.dumps(OPINIONS))
        return place

    return folder


@pytest.fixture(scope="session")
def start_server(make_sharp, folder_of):
    """start_server(**values) -> a VllmEngine with a server of its own."""
    pytest.importorskip("vllm.entrypoints")
    return lambda **values: VllmEngine.start_server(str(folder_of("llama")), make_sharp("llama").tokenizer, **{**VALUES, **values})


@pytest.fixture(scope="session")
def running(make_sharp, folder_of):
    """running(kind) -> (engine, Loaded with the weights it began with). The engine in the process has tied weights, the server's untied."""
    pytest.importorskip("vllm.entrypoints")
    made = {}

    def get(kind):
        if kind not in made:
            name, make = {"local": ("llama_tied", VllmEngine.in_process), "server": ("llama", VllmEngine.start_server)}[kind]
            loaded = make_sharp(name)
            made[kind] = make(str(folder := folder_of(name)), loaded.tokenizer, **VALUES), loaded
            shutil.rmtree(folder)          # is read at the start only
        return made[kind]

    yield get
    for engine, _ in made.values():
        engine.close()


@pytest.fixture(params=["local", "server"])
def pair(request, running):
    """An engine with the weights of version 0, and those weights as a transformers module."""
    engine, loaded = running(request.param)
    if engine.version != 0:
        engine.load(0, loaded.module.state_dict().items())
    return engine, loaded
