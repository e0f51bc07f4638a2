"""An SGLang server as an engine, by its native HTTP API.

Written to the server's documentation and source, and tested against a stand-in that answers as they say: SGLang itself was not run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from burnish.chat.template import by_ids
from burnish.config import Sampling
from burnish.engines.base import Abilities, Completion, EngineError, Request, check_sampling
from burnish.engines.calls import CallError, Calls
from burnish.engines.native.stops import Stops
from burnish.engines.served import failed, log_probs, token_ids, told_of, unserved, written

FILTERS = frozenset({"top_k", "top_p", "min_p"})
HONOURED = frozenset({"temperature", "max_new_tokens", "stop", "end_tokens", "logit_bias"}) | FILTERS
FILE_BYTES = 2 * 2**30


class SglangEngine:
    """The model of an SGLang server at `base_url`, as http://127.0.0.1:30000.

    folder: where `load` writes weights, of this engine alone and seen by the server under the same path; none: weights cannot be published.
    logprobs: SGLang tells log-probs under the temperature but before filters, so with them top_k, top_p and min_p are refused; False asks
    for none and takes filters. The server must not run with SGLANG_RETURN_ORIGINAL_LOGPROB. The model's own end tokens always end a turn
    there: name those in sampling.end_tokens, or such a turn is refused. weight_version: what the server calls the weights that it was
    started with; answers of others than those of the last `load` are refused, so a server that restarted is noticed. send_seed: the seed of
    a request is made of its stream, for a server with --enable-deterministic-inference. load_timeout_s: for the server to read weights. The
    rest: as in Calls.
    """

    abilities = Abilities(logprobs=True, shares_weights=False, streams=False, live=False, sampling=HONOURED - FILTERS)

    def __init__(
        self, base_url: str, tokenizer: Any, *, context_tokens: int, folder: str | Path | None = None, logprobs: bool = True,
        weight_version: str = "default", key_env: str | None = None, send_seed: bool = False, load_timeout_s: float = 600.0,
        concurrency: int = 256, timeout_s: float = 600.0, tries: int = 5, backoff_s: float = 0.5,
    ) -> None:
        sampling = HONOURED - FILTERS if logprobs else HONOURED
        self.abilities = replace(self.abilities, logprobs=logprobs, publish=folder is not None, sampling=sampling)
        self.tokenizer, self.context_tokens, self.send_seed, self.load_timeout_s = tokenizer, context_tokens, send_seed, load_timeout_s
        self.folder = None if folder is None else Path(folder)
        self.version = 0
        self.loaded = weight_version        # the version as the server tells it
        self.calls = Calls(base_url, key_env=key_env, concurrency=concurrency, timeout_s=timeout_s, tries=tries, backoff_s=backoff_s)

    def check(self, sampling: Sampling) -> None:
        """Raises EngineError for settings that are not honoured, and for a server that is not healthy."""
        check_sampling(self.abilities, sampling, name="sglang")
        try:
            self.calls.get("/health")
        except CallError as error:
            raise EngineError(f"the SGLang server at {self.calls.base_url} is not healthy: {error.what}") from error

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests; see Engine."""
        check_sampling(self.abilities, sampling, name="sglang")
        sampling = by_ids(sampling, self.tokenizer)
        stops = Stops(self.tokenizer, end_token_ids=sampling.end_tokens, stop=sampling.stop)
        done = [unserved(r.tokens, context_tokens=self.context_tokens, version=self.version) for r in requests]
        asked = sorted((i for i, c in enumerate(done) if c is None), key=lambda i: -requests[i].priority)
        limits = {i: min(requests[i].max_new_tokens, self.context_tokens - len(requests[i].tokens)) for i in asked}
        bodies = [self._body(requests[i], sampling, limits[i]) for i in asked]
        answers = self.calls.post_all("/generate", bodies, told_of(progress, len(requests)))
        for i, answer in zip(asked, answers, strict=True):
            try:
                done[i] = self._read(answer, sampling, stops, limits[i], requests[i].max_new_tokens)
            except CallError as error:
                done[i] = failed(error, version=self.version)
        return done

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Writes the weights as safetensors into a folder of their own, and has the server read them and forget its prefixes.

        Requests that run there end first, with the old weights. Raises EngineError where the server did not take them.
        """
        if weights is None:
            if version != self.version:
                raise EngineError(f"version {version} comes without weights, and the server has its own copy; give the weights")
            return
        if self.folder is None:
            raise EngineError("this sglang engine was made without a folder to publish weights in; give one that the server can read")
        place = self.folder / f"version-{version}"
        _write(place, weights)
        body = {"model_path": str(place.resolve()), "flush_cache": True, "weight_version": str(version)}
        try:
            answer = self.calls.post("/update_weights_from_disk", body, timeout_s=self.load_timeout_s)
        except CallError as error:
            raise EngineError(f"the SGLang server did not take version {version} of the weights: {error.what}") from error
        if not isinstance(answer, dict) or answer.get("success") is not True:
            told = answer.get("message") if isinstance(answer, dict) else answer
            raise EngineError(f"the SGLang server did not take version {version} of the weights: {str(told)[:200]}")
        self.version, self.loaded = version, str(version)
        for other in self.folder.glob("version-*"):
            if other != place:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        self.calls.close()

    def _body(self, request: Request, sampling: Sampling, limit: int) -> dict[str, Any]:
        params = {
            "max_new_tokens": limit, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p, "stop": list(sampling.stop), "stop_token_ids": list(sampling.end_tokens), "no_stop_trim": True,
            "skip_special_tokens": False, "spaces_between_special_tokens": False,
        }
        if sampling.logit_bias:
            params["logit_bias"] = {str(token): value for token, value in sampling.logit_bias.items()}
        if self.send_seed:
            params["sampling_seed"] = request.stream % 2**31
        return {"input_ids": list(request.tokens), "sampling_params": params, "return_logprob": self.abilities.logprobs, "stream": False}

    def _read(self, answer: Any, sampling: Sampling, stops: Stops, limit: int, max_new_tokens: int) -> Completion:
        if isinstance(answer, CallError):
            raise answer
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        finish = meta.get("finish_reason") if isinstance(meta, dict) else None
        kind = finish.get("type") if isinstance(finish, dict) else None
        if kind == "abort":
            raise CallError(f"aborted: {str(finish.get('message'))[:200]}", at_server=finish.get("status_code") != 400)
        if kind not in ("stop", "length"):
            raise CallError(f"finish_reason is {finish!r}: the answer is not whole", at_server=True)
        if (told := meta.get("weight_version", self.loaded)) != self.loaded:
            raise CallError(f"the server has the weights {told!r}, not {self.loaded!r}: started anew, or loaded by another", at_server=True)
        if finish.get("matched") == "NaN happened":
            return Completion((), (), "", "error:non_finite_logits", self.version)
        tokens, logp = self._tokens(answer, meta, limit)
        return written(
            tokens, logp, sampling=sampling, stops=stops, by_length=kind == "length", max_new_tokens=max_new_tokens, version=self.version
        )

    def _tokens(self, answer: dict[str, Any], meta: dict[str, Any], limit: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        rows = meta.get("output_token_logprobs") if self.abilities.logprobs else None
        if rows is None:
            return token_ids(answer.get("output_ids"), name="output_ids", limit=limit), ()
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) >= 2 for row in rows):
            raise CallError("output_token_logprobs are not rows of log-prob and token", at_server=True)
        tokens = token_ids([row[1] for row in rows], name="output_token_logprobs", limit=limit)
        return tokens, log_probs([row[0] for row in rows], count=len(tokens))


def _write(place: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Files of up to FILE_BYTES, and one tensor more, in a folder that gets its name when it is whole."""
    aside = place.with_name(place.name + ".part")
    for old in (aside, place):
        shutil.rmtree(old, ignore_errors=True)
    aside.mkdir(parents=True)
    held: dict[str, Tensor] = {}
    num_files = 0

    def flush() -> None:
        nonlocal num_files
        num_files += 1
        save_file(held, aside / f"model-{num_files:05}.safetensors", metadata={"format": "pt"})
        held.clear()

    for name, tensor in weights:
        tensor = tensor.detach().cpu().contiguous()
        shared = any(tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in held.values())
        held[name] = tensor.clone() if shared else tensor       # safetensors refuses two names of one memory, as tied heads have
        if sum(t.nbytes for t in held.values()) >= FILE_BYTES:
            flush()
    if held:
        flush()
    if not num_files:
        raise EngineError("the weights to publish are empty")
    aside.rename(place)
