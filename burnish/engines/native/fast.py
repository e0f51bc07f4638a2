"""Decoders of the Llama family on packed weights, by the compiled step: a whole step of all rows in one call."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from burnish.config import Sampling
from burnish.engines.native.build import library
from burnish.engines.native.pages import PAGE_TOKENS
from burnish.engines.native.scheduler import Rows
from burnish.engines.native.torch_runner import windows_of
from burnish.models.policy import Policy

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_PART = ("qkv", "o", "gate_up", "down", "norm1", "norm2", "qkv_bias", "q_norm", "k_norm")
_INTS = ("layers", "width", "heads", "kv_heads", "head_dim", "inner", "vocab", "window", "threads", "is_bf16")


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _PART]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in _INTS), *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("layer", ctypes.POINTER(_Layer)), *((name, ctypes.c_void_p) for name in ("embed", "norm", "head", "cos", "sin")),
    ]


class Unsuited(ValueError):
    """Why a model does not run by the compiled step."""


class FastRunner:
    """Runs rows of (token, position, slot). Its weights are packed copies, made anew by `refresh` from the module that is trained."""

    row_exact = True               # a row's numbers do not depend on the rows beside it

    def __init__(self, policy: Policy, *, context_tokens: int) -> None:
        _check(policy)
        self.library = library()
        self.policy, self.config = policy, policy.config
        self.context_tokens = context_tokens
        self.dtype, self.threads = policy.head.weight.dtype, torch.get_num_threads()
        self.packed: dict[str, Tensor] = {}
        self.spare = torch.empty(0, dtype=self.dtype)      # memory for packed weights, taken from its beginning
        self.num_pages = 0
        self.refresh()

    def refresh(self) -> None:
        """Take over the module's weights as they are now."""
        config, body = self.config, self.policy.body
        layers = (_Layer * config.num_hidden_layers)()
        for i, layer in enumerate(body.layers):
            attention, mlp = layer.self_attn, layer.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            bias = None
            if projections[0].bias is not None:
                bias = self._keep(f"{i}.bias", torch.cat([p.bias.detach() for p in projections]).float())
            norms = layer.input_layernorm, layer.post_attention_layernorm, *(getattr(attention, n, None) for n in ("q_norm", "k_norm"))
            norm1, norm2, q_norm, k_norm = (
                self._keep(f"{i}.norm{n}", norm.weight) if norm is not None else None for n, norm in enumerate(norms)
            )
            layers[i] = _Layer(
                self._pack(f"{i}.qkv", *map(_weight, projections)),
                self._pack(f"{i}.o", _weight(attention.o_proj)),
                self._pack(f"{i}.gate_up", _weight(mlp.gate_proj), _weight(mlp.up_proj), in_turn=True),
                self._pack(f"{i}.down", _weight(mlp.down_proj)),
                norm1, norm2, bias, q_norm, k_norm,
            )
        if not hasattr(self, "cos"):
            position = torch.arange(self.context_tokens)[None]
            cos, sin = body.rotary_emb(torch.zeros(1, 1, dtype=self.dtype), position)
            self.cos, self.sin = cos[0].float().contiguous(), sin[0].float().contiguous()
        head_dim = _head_dim(config)
        self.layers = layers
        self.model = _Model(
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_dim,
            config.intermediate_size, config.vocab_size, next(iter(windows_of(config).values())) or 0, self.threads,
            int(self.dtype is torch.bfloat16), config.rms_norm_eps, head_dim**-0.5, layers,
            self._keep("embed", body.embed_tokens.weight), self._keep("norm", body.norm.weight),
            self._pack("head", _weight(self.policy.head)),
            self.cos.data_ptr(), self.sin.data_ptr(),
        )

    def reserve(self, *, num_pages: int, rows: int) -> None:
        """Room for so many pages and rows. What is in the cache stays."""
        config, head_dim = self.config, _head_dim(self.config)
        if num_pages != self.num_pages:
            shape = config.num_hidden_layers, num_pages, config.num_key_value_heads * PAGE_TOKENS * head_dim
            held = getattr(self, "keys", None), getattr(self, "values", None)
            self.keys, self.values = (self._large(*shape).zero_() for _ in held)
            for old, new in zip(held, (self.keys, self.values), strict=True):
                if old is not None:
                    new[:, : self.num_pages] = old
            self.num_pages = num_pages
        heads = (config.num_attention_heads * 2 + 2 * config.num_key_value_heads) * head_dim
        self.work = self._large(rows * (2 * config.hidden_size + heads + config.intermediate_size) + 64)
        self.logits = self._large(rows, config.vocab_size, dtype=torch.float32)

    def release(self) -> None:
        """Give the cache back."""
        self.num_pages = 0
        self.keys = self.values = self.work = self.logits = None

    def step(self, rows: Rows, table: np.ndarray) -> Tensor:
        """Writes the rows into the cache and returns the logits of the last rows, which the next step writes over. -> [L,V] float32"""
        logits = self.logits[: len(rows.last)]
        self.library.burnish_step(
            ctypes.byref(self.model), len(rows.token), _at(rows.token), _at(rows.position), _at(rows.slot), _at(table), table.shape[1],
            ctypes.c_void_p(self.keys.data_ptr()), ctypes.c_void_p(self.values.data_ptr()), ctypes.c_int64(self.num_pages),
            ctypes.c_void_p(self.work.data_ptr()), ctypes.c_void_p(logits.data_ptr()), _at(rows.last), len(rows.last),
        )
        return logits

    def products(self, num_rows: int) -> float:
        """Seconds that the matrix products of one step of so many rows take by themselves, for measuring."""
        config = self.config
        heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * _head_dim(config)
        work = self._large(num_rows * 4 * (config.intermediate_size + config.hidden_size + heads)).zero_()
        logits = self._large(num_rows, self.config.vocab_size, dtype=torch.float32).zero_()
        for _ in range(2):                       # the first one finds the memory cold
            began = time.perf_counter()
            self.library.burnish_products(
                ctypes.byref(self.model), num_rows, ctypes.c_void_p(work.data_ptr()), ctypes.c_void_p(logits.data_ptr())
            )
        return time.perf_counter() - began

    def copy_page(self, source: int, target: int) -> None:
        self.library.burnish_copy_page(
            ctypes.byref(self.model), ctypes.c_void_p(self.keys.data_ptr()), ctypes.c_void_p(self.values.data_ptr()),
            ctypes.c_int64(self.num_pages), ctypes.c_int64(source), ctypes.c_int64(target),
        )

    def clear_page(self, page: int) -> None:
        for block in (self.keys, self.values):
            block[:, page] = 0

    def draw(self, logits_NV: Tensor, uniform_N: np.ndarray, sampling: Sampling) -> tuple[list[int], list[float]]:
        """As sampler.draw."""
        n, vocab = logits_NV.shape
        token, logp = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.float32)
        self.library.burnish_draw(
            self.model.threads, ctypes.c_void_p(logits_NV.data_ptr()), n, vocab, ctypes.c_float(sampling.temperature), sampling.top_k,
            ctypes.c_float(sampling.top_p), ctypes.c_float(sampling.min_p), _at(uniform_N), _at(token), _at(logp),
        )
        return token.tolist(), logp.tolist()

    def _pack(self, name: str, *weights: Tensor, in_turn: bool = False) -> int:
        """Maps of the same input side by side, or their tiles of 16 outputs in turn."""
        width, tiles = weights[0].shape[1], [-(-len(w) // 16) for w in weights]
        if name not in self.packed:
            self.packed[name] = self._take(sum(tiles) * 16 * width)
        first = 0
        for i, (weight, count) in enumerate(zip(weights, tiles, strict=True)):
            weight = weight.contiguous()
            self.library.burnish_pack(
                ctypes.c_void_p(weight.data_ptr()), len(weight), width, self.model_is_bf16, ctypes.c_void_p(self.packed[name].data_ptr()),
                i if in_turn else first, len(weights) if in_turn else 1, self.threads,
            )
            first += count
        return self.packed[name].data_ptr()

    def _take(self, size: int) -> Tensor:
        if size > len(self.spare):
            self.spare = self._large(max(size, 2**25))
        taken, self.spare = self.spare[:size], self.spare[-(-size // 32) * 32 :]
        return taken

    def _large(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory in large pages, not yet touched."""
        block = torch.empty(shape, dtype=dtype or self.dtype)
        self.library.burnish_large_pages(ctypes.c_void_p(block.data_ptr()), ctypes.c_int64(block.numel() * block.element_size()))
        return block

    @property
    def model_is_bf16(self) -> int:
        return int(self.dtype is torch.bfloat16)

    def _keep(self, name: str, value: Tensor) -> int:
        """A copy: what is trained on meanwhile must not be seen before it is taken over."""
        value = value.detach()
        if name not in self.packed:
            own = value.dtype == self.dtype
            self.packed[name] = (self._take(value.numel()) if own else torch.empty(value.numel(), dtype=value.dtype)).view(value.shape)
        self.packed[name].copy_(value)
        return self.packed[name].data_ptr()


def _weight(linear: nn.Module) -> Tensor:
    """Of a linear map, with its LoRA adapter added in where it has one."""
    weight = linear.weight.detach()
    for adapter in getattr(linear, "active_adapters", ()):
        if adapter in linear.lora_A and adapter not in linear.merged_adapters:
            weight = weight + linear.get_delta_weight(adapter).detach().to(weight.dtype)
    return weight


def _at(values: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check(policy: Policy) -> None:
    """Raises Unsuited with the reason."""
    config = policy.config
    if config.model_type not in MODEL_TYPES:
        raise Unsuited(f"{config.model_type} is none of {', '.join(MODEL_TYPES)}")
    if policy.device.type != "cpu":
        raise Unsuited("the model is not on a CPU")
    if policy.head.weight.dtype not in (torch.float32, torch.bfloat16):
        raise Unsuited(f"the weights are {policy.head.weight.dtype}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise Unsuited(f"its rotary positions ({rope}) change with the length")
    for name, value, unit in (
        ("hidden_size", config.hidden_size, 16), ("intermediate_size", config.intermediate_size, 16), ("head_dim", _head_dim(config), 16),
    ):
        if value % unit:
            raise Unsuited(f"{name} {value} is no multiple of {unit}")
    if config.hidden_act != "silu":
        raise Unsuited(f"its activation is {config.hidden_act}")
    kinds = set(getattr(config, "layer_types", None) or ())
    if len(kinds) > 1:
        raise Unsuited("its layers are not all of one kind")
    for layer in policy.body.layers:
        names = *(f"self_attn.{n}_proj" for n in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
        parts = [layer.get_submodule(name) for name in names]
        plain = [getattr(part, "base_layer", part) for part in parts]
        known = {id(m) for part in parts for m in part.modules()}
        if any(isinstance(m, nn.Linear) and id(m) not in known for m in layer.modules()) or any(type(m) is not nn.Linear for m in plain):
            raise Unsuited("a layer has other linear maps than the seven of the Llama family")
        if any(m.bias is not None for m in plain[3:]):
            raise Unsuited("a layer has biases elsewhere than on queries, keys and values")
        if any(getattr(part, "lora_variant", None) or any(getattr(part, "lora_bias", {}).values()) for part in parts):
            raise Unsuited("its adapter is more than the product of two matrices added to a third")
    kept = [p for name, p in policy.base.named_parameters() if "lora_" not in name and "value_head" not in name]
    if len(dtypes := {p.dtype for p in kept}) > 1:
        raise Unsuited(f"its weights are of several kinds: {', '.join(sorted(map(str, dtypes)))}")
    if type(policy.body.embed_tokens) is not nn.Embedding or type(policy.head) is not nn.Linear:
        raise Unsuited("its embedding or head has an adapter")
