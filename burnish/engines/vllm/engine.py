"""The policy sampled by vLLM: token ids in, token ids and the log-probs they were drawn with out, weights taken over from the trainer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from burnish.chat.template import by_ids
from burnish.config import Sampling
from burnish.engines import served
from burnish.engines.base import Abilities, Completion, EngineError, Request, check_sampling
from burnish.engines.calls import CallError
from burnish.engines.native.stops import Stops
from burnish.engines.served import NEVER_NATS
from burnish.engines.vllm.link import Ask, Link, Settings, Written

COOLEST = 0.01
"""vLLM raises temperatures between 0 and this to it."""
BIAS = 100.0
"""vLLM's server moves a logit_bias beyond this back to it."""

HONOURED = frozenset({
    "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop", "end_tokens", "logit_bias", "banned_tokens", "repetition_penalty",
})

Asked = tuple[Request, Sampling, Stops]


class VllmEngine:
    """Made by `in_process`, `start_server` or `at_url`. `options` go to vLLM as they are, by the names of its engine arguments.

    vLLM draws its own random numbers: a request's seed is made of its stream and length, so the same requests in the same batch give
    the same tokens, but another batch may round otherwise. A request runs on one version of the weights from its start to its end:
    `load` waits for those that run.
    """

    abilities = Abilities(logprobs=True, shares_weights=False, streams=False, sampling=HONOURED)

    def __init__(self, link: Link, tokenizer: Any) -> None:
        self.link, self.tokenizer = link, tokenizer
        self.version = 0
        self.closed = False
        self.next_id = 0
        self.asked: dict[int, Asked] = {}
        self.ended: dict[int, Completion] = {}

    @classmethod
    def in_process(
        cls, model: str, tokenizer: Any, *, dtype: str = "auto", context_tokens: int | None = None, seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> VllmEngine:
        """vLLM inside of this process, with one worker. `model` is a folder or hub name. Raises EngineError."""
        from burnish.engines.vllm.local import Local

        return cls(Local(model, dtype=dtype, context_tokens=context_tokens, seed=seed, options=options or {}), tokenizer)

    @classmethod
    def start_server(
        cls, model: str, tokenizer: Any, *, dtype: str = "auto", context_tokens: int | None = None, seed: int = 0,
        options: Mapping[str, Any] | None = None, python: str | None = None, start_timeout_s: float = 900.0,
        tell: Callable[[str], None] | None = None, weights_dir: Path | str | None = None, load_timeout_s: float = 600.0,
    ) -> VllmEngine:
        """vLLM's server as a process of its own on 127.0.0.1, which ends with this one.

        python: an interpreter in whose environment vllm and burnish are; none: this one. tell: takes a line every few seconds of the
        start; none: standard error. weights_dir: where weights lie on their way; none: shared memory, or the folder for temporary files
        where it has no room. Raises EngineError with the server's errors where it does not answer within start_timeout_s.
        """
        from burnish.engines.vllm.server import start

        return cls(
            start(
                model, dtype=dtype, context_tokens=context_tokens, seed=seed, options=options or {}, python=python,
                timeout_s=start_timeout_s, tell=tell, weights_dir=weights_dir, load_timeout_s=load_timeout_s,
            ),
            tokenizer,
        )

    @classmethod
    def at_url(
        cls, url: str, tokenizer: Any, *, key: str | None = None, weights_dir: Path | str | None = None, load_timeout_s: float = 600.0,
    ) -> VllmEngine:
        """A server that runs already, as http://127.0.0.1:8000.

        It is started with VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs, --generation-config vllm and
        --worker-extension-cls burnish.engines.vllm.worker.WeightsFromTrainer, and sees weights_dir; for any other one there is the
        remote engine. In that mode anyone who reaches its port rules it: keep it to 127.0.0.1. key: what VLLM_API_KEY is there.
        """
        from burnish.engines.vllm.server import Server

        return cls(Server(url, key=key, weights_dir=weights_dir, load_timeout_s=load_timeout_s), tokenizer)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests; see Engine. Raises EngineError where vLLM itself is gone."""
        self.check(sampling)
        stream = self.stream(requests)
        ids: dict[int, int] = {}
        done: dict[int, Completion] = {}
        try:
            for place in sorted(range(len(requests)), key=lambda i: -requests[i].priority):     # vLLM starts them as they come
                ids[place] = stream.submit(requests[place], sampling)
            while len(done) < len(ids):
                done |= dict(stream.advance())
                if progress:
                    progress(len(done), len(ids))
        except BaseException:      # an interrupted run leaves nothing running behind
            for id_ in ids.values():
                stream.cancel(id_)
            raise
        return [done[ids[place]] for place in range(len(requests))]

    def stream(self, expected: Sequence[Request] = ()) -> Stream:
        """Requests that come and go: submit, cancel, advance."""
        return Stream(self)

    def check(self, sampling: Sampling) -> None:
        """Raises EngineError for settings that are not honoured, and where vLLM's weights are not those of the last load."""
        check_sampling(self.abilities, sampling, name="vllm")
        _check_order(sampling)
        self._check_open()
        self.link.check_version(self.version)

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """The weights of `version`, by the names of the model's checkpoint, are sampled from when this returns; see Engine.

        Requests that run end on the earlier ones first. Raises EngineError, with the earlier weights in place, where what arrives is not
        what was sent or does not fit the model; where vLLM broke off inside, it does not generate until a load succeeds.
        """
        self._check_open()
        if weights is None:
            raise EngineError("the vllm engine has its own copy of the weights; give load the trainer's")
        while self.asked:
            self._advance()
        self.link.load(version, weights)
        self.version = version

    def close(self) -> None:
        self.closed = True
        self.link.close()
        self.asked.clear()

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the vllm engine was closed; make a new one")

    def _advance(self) -> None:
        try:
            found = self.link.advance()
        except EngineError:
            self.asked.clear()
            raise
        for id_, written in found:
            self.ended[id_] = _completion(written, self.asked.pop(id_), version=self.version)


class Stream:
    """Requests on an engine. `advance` waits for something to end and gives it."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine, self.mine = engine, set()
        self.rules: dict[int, tuple[Sampling, Stops, Settings]] = {}

    def submit(self, request: Request, sampling: Sampling) -> int:
        """The id by which `advance` and `cancel` speak of it. One that cannot run ends as error:<what> at the next advance.

        Raises EngineError as VllmEngine.check.
        """
        engine = self.engine
        if id(sampling) not in self.rules:
            engine.check(sampling)
            ids = by_ids(sampling, engine.tokenizer)
            stops = Stops(engine.tokenizer, end_token_ids=ids.end_tokens, stop=sampling.stop)
            self.rules[id(sampling)] = sampling, stops, _settings(ids, vocabulary=engine.link.vocabulary)
        _, stops, settings = self.rules[id(sampling)]
        id_, engine.next_id = engine.next_id, engine.next_id + 1
        self.mine.add(id_)
        context = engine.link.context_tokens
        if (refused := served.unserved(request.tokens, context_tokens=context, version=engine.version)) is not None:
            engine.ended[id_] = refused
            return id_
        most = min(request.max_new_tokens, context - len(request.tokens))
        engine.link.submit(id_, Ask(request.tokens, most, _seed(request)), settings)
        engine.asked[id_] = request, sampling, stops
        return id_

    def cancel(self, id_: int) -> None:
        """Take a request out, whatever it has written. One that is not there any more is left alone."""
        self.engine.link.cancel(id_)
        self.engine.asked.pop(id_, None)
        self.engine.ended.pop(id_, None)
        self.mine.discard(id_)

    def advance(self) -> list[tuple[int, Completion]]:
        engine = self.engine
        if self.mine and not self.mine & engine.ended.keys():
            try:
                engine._advance()
            except EngineError:
                self.mine.clear()
                raise
        found = sorted(self.mine & engine.ended.keys())
        self.mine -= set(found)
        return [(id_, engine.ended.pop(id_)) for id_ in found]


def _check_order(sampling: Sampling) -> None:
    """Raises EngineError where vLLM would draw from another distribution than the one that the trainer scores."""
    if 0 < sampling.temperature < COOLEST:
        raise EngineError(f"vLLM raises sampling.temperature {sampling.temperature} to {COOLEST}; use 0, or {COOLEST} or more")
    if sampling.min_p > 0 and sampling.top_p < 1:
        raise EngineError("vLLM applies sampling.min_p before top_p, burnish after it; remove one of the two, or use the native engine")
    if sampling.logit_bias and sampling.repetition_penalty != 1:
        raise EngineError(
            "vLLM applies sampling.logit_bias before repetition_penalty, burnish after it; remove one of the two, or use the native engine"
        )
    if far := [token for token, bias in sampling.logit_bias.items() if abs(bias) > BIAS]:
        raise EngineError(f"vLLM takes a sampling.logit_bias of at most {BIAS:g} either way; that of token {far[0]} is beyond")


def _settings(sampling: Sampling, *, vocabulary: int) -> Settings:
    """By vLLM's names, every one that could be taken from elsewhere. Tokens are ids."""
    allowed = sorted({*range(vocabulary)} - {*sampling.banned_tokens}) if sampling.banned_tokens else None
    return {
        "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "logit_bias": {str(t): b for t, b in sampling.logit_bias.items()} or None, "allowed_token_ids": allowed, "bad_words": [],
        "stop": list(sampling.stop), "stop_token_ids": list(sampling.end_tokens), "ignore_eos": True, "min_tokens": 0,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    }


def _seed(request: Request) -> int:
    """63 bits of stream and length: a later turn of a conversation does not draw the numbers of an earlier one again."""
    digest = hashlib.blake2b(f"{request.stream}\0{len(request.tokens)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _completion(written: Written, asked: Asked, *, version: int) -> Completion:
    request, sampling, stops = asked
    if written.error is not None:
        return Completion((), (), "", f"error:{written.error}", version)
    bad = next((i for i, x in enumerate(written.logp) if x is None or not NEVER_NATS < x < math.inf), None)
    if bad is not None or len(written.logp) != len(written.tokens):
        kept = written.tokens[:bad] if bad is not None else ()
        what = "non_finite_logits" if bad is not None else f"vllm gave {len(written.logp)} log-probs for {len(written.tokens)} tokens"
        return Completion(kept, tuple(written.logp[: len(kept)]), stops.decode(kept), f"error:{what}", version)
    if written.finish == "abort":
        return Completion(written.tokens, written.logp, stops.decode(written.tokens), "cancelled", version)
    try:
        return served.written(
            written.tokens, written.logp, sampling=sampling, stops=stops, by_length=written.finish == "length",
            max_new_tokens=request.max_new_tokens, version=version,
        )
    except CallError as error:
        return Completion((), (), "", error.stop, version)
