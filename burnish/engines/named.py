"""The engines that a recipe can name. Each is called with the policy, its tokenizer and the longest sequence."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.engines.native import NativeEngine as native
from burnish.engines.sglang import SglangEngine
from burnish.engines.vllm import VllmEngine
from burnish.models.export import export
from burnish.models.policy import Policy

__all__ = ["native", "sglang", "vllm"]


def vllm(
    policy: Policy, tokenizer: Any, *, context_tokens: int, server: bool = True, python: str | None = None, url: str | None = None,
    options: Mapping[str, Any] | None = None, start_timeout_s: float = 900.0, weights_dir: str | None = None,
) -> VllmEngine:
    """vLLM with a copy of the policy: a server of its own, which ends with the run; in this process with server: false; or the one at
    `url`, which has the same model. See VllmEngine for the others.
    """
    if url is not None:
        return VllmEngine.at_url(url, tokenizer, weights_dir=weights_dir)
    dtype = str(policy.head.weight.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix="burnish-") as temporary:      # read at its start only
        folder = f"{temporary}/model"
        export(policy.module, tokenizer, folder, end_token_ids=(), stop=())
        if not server:
            return VllmEngine.in_process(folder, tokenizer, dtype=dtype, context_tokens=context_tokens, options=options)
        return VllmEngine.start_server(
            folder, tokenizer, dtype=dtype, context_tokens=context_tokens, options=options, python=python, start_timeout_s=start_timeout_s,
            weights_dir=weights_dir,
        )


def sglang(
    policy: Policy, tokenizer: Any, *, context_tokens: int, base_url: str, folder: str, key_env: str | None = None, concurrency: int = 256
) -> SglangEngine:
    """An SGLang server that has the same model; `folder` is where it reads new weights. See SglangEngine."""
    return SglangEngine(
        base_url, tokenizer, context_tokens=context_tokens, folder=Path(folder), key_env=key_env, concurrency=concurrency
    )


vllm.abilities = VllmEngine.abilities
sglang.abilities = SglangEngine.abilities
