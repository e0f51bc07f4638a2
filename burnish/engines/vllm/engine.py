"""The policy sampled by vLLM: token ids in, token ids and the log-probs they were drawn with out, weights taken over from the trainer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from burnish.chat.template import by_ids
from burnish.config import Sampling
from burnish.engines.base import Abilities, Completion, EngineError, Request, check_sampling
from burnish.engines.native.stops import Stops
from burnish.engines.vllm.link import Ask, Link, Settings, Written

COOLEST = 0.01
"""vLLM raises temperatures between 0 and this to it."""
BIAS = 100.0
"""vLLM's server moves a logit_bias beyond this back to it."""

ABILITIES = Abilities(
    logprobs=True, shares_weights=False, streams=False,
    sampling=frozenset({
        "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop", "end_tokens", "logit_bias", "banned_tokens",
        "repetition_penalty", "also_in_training",
    }),
)


class VllmEngine:
    """Made by `in_process`, `start_server` or `at_url`. `options` go to vLLM as they are, by the names of its engine arguments.

    vLLM draws its own random numbers: a request's seed is made of its stream and length, so the same requests in the same batch give
    the same tokens, but another batch may round otherwise. A request runs on one version of the weights from its start to its end:
    `load` waits for those that run.
    """

    def __init__(self, link: Link, tokenizer: Any) -> None:
        self.link, self.tokenizer = link, tokenizer
        self.version = 0
        self.abilities = replace(ABILITIES, logprobs=link.logprobs, publish=link.publish)
        self.next_id = 0
        self.asked: dict[int, tuple[Request, Stops, bool]] = {}
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
        start; none: standard error. weights_dir: where weights lie on their way; none: shared memory. Raises EngineError with the end
        of the server's log where it does not answer within start_timeout_s.
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

        To give log-probs and take weights it is started with VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs,
        --generation-config vllm and --worker-extension-cls burnish.engines.vllm.worker.WeightsFromTrainer, and sees weights_dir. One
        without that part has no such abilities. In that mode anyone who reaches its port rules it: keep it to 127.0.0.1.
        """
        from burnish.engines.vllm.server import Server

        return cls(Server(url, key=key, weights_dir=weights_dir, load_timeout_s=load_timeout_s), tokenizer)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests; see Engine. Raises EngineError where vLLM itself is gone."""
        stream = self.stream(sampling, requests)
        ids = [0] * len(requests)
        for place in sorted(range(len(requests)), key=lambda i: -requests[i].priority):     # vLLM starts them as they come
            ids[place] = stream.submit(requests[place])
        done: dict[int, Completion] = {}
        try:
            while len(done) < len(ids):
                done |= dict(stream.advance())
                if progress:
                    progress(len(done), len(ids))
        except BaseException:      # an interrupted run leaves nothing running behind
            for id_ in ids:
                stream.cancel(id_)
            raise
        return [done[i] for i in ids]

    def stream(self, sampling: Sampling, expected: Sequence[Request] = ()) -> Stream:
        """Requests that come and go: submit, cancel, advance."""
        if expected or self.asked:
            self.link.check_version(self.version)
        return Stream(self, sampling)

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """The weights of `version`, by the names of the model's checkpoint, are sampled from when this returns; see Engine.

        Requests that run end on the earlier ones first. Raises EngineError, with the earlier weights in place, where what arrives is not
        what was sent or does not fit the model; where vLLM broke off inside, it does not generate until a load succeeds.
        """
        if not self.abilities.publish:
            raise EngineError("this vLLM server takes no weights: burnish's part is not in its workers; see VllmEngine.at_url")
        if weights is None:
            raise EngineError("the vllm engine has its own copy of the weights; give load the trainer's")
        while self.asked:
            self._advance()
        self.link.load(version, weights)
        self.version = version

    def close(self) -> None:
        self.link.close()
        self.asked.clear()

    def _advance(self) -> None:
        try:
            found = self.link.advance()
        except EngineError:
            self.asked.clear()
            raise
        for id_, written in found:
            request, stops, greedy = self.asked.pop(id_)
            self.ended[id_] = _completion(written, request, stops, greedy=greedy, version=self.version, logprobs=self.abilities.logprobs)


class Stream:
    """One sampling's requests on an engine. `advance` waits for something to end and gives it."""

    def __init__(self, engine: VllmEngine, sampling: Sampling) -> None:
        check_sampling(engine.abilities, sampling, name="vllm")
        self.engine, self.mine = engine, set()
        ids = by_ids(sampling, engine.tokenizer)
        self.stops = Stops(engine.tokenizer, end_token_ids=ids.end_tokens, stop=sampling.stop)
        self.settings = _settings(ids, vocabulary=engine.link.vocabulary or len(engine.tokenizer))
        self.greedy = sampling.temperature == 0

    def submit(self, request: Request) -> int:
        """The id by which `advance` and `cancel` speak of it. One that cannot run ends as error:<what> at the next advance."""
        engine = self.engine
        id_, engine.next_id = engine.next_id, engine.next_id + 1
        self.mine.add(id_)
        room = engine.link.context_tokens - len(request.tokens)
        what = "empty_prompt" if not request.tokens else "prompt_too_long" if room < 1 else None
        if what is not None:
            engine.ended[id_] = Completion((), (), "", f"error:{what}", engine.version)
            return id_
        engine.asked[id_] = request, self.stops, self.greedy
        engine.link.submit(id_, Ask(request.tokens, min(request.max_new_tokens, room), _seed(request)), self.settings)
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


def _settings(sampling: Sampling, *, vocabulary: int) -> Settings:
    """By vLLM's names, every one that could be taken from elsewhere. Raises EngineError where vLLM would draw from another distribution."""
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


def _completion(written: Written, request: Request, stops: Stops, *, greedy: bool, version: int, logprobs: bool) -> Completion:
    tokens, logp = written.tokens, written.logp
    reason = f"error:{written.error}" if written.error else _reason(written, request, stops)
    if logprobs:
        if len(logp) != len(tokens):
            reason, tokens, logp = f"error:vllm gave {len(logp)} log-probs for {len(tokens)} tokens", (), ()
        elif (bad := next((i for i, x in enumerate(logp) if x is None or not math.isfinite(x)), None)) is not None:
            reason, tokens, logp = "error:non_finite_logits", tokens[:bad], logp[:bad]
        elif greedy:
            logp = (0.0,) * len(tokens)            # the most probable token was certain; vLLM gives what it had at temperature 1
    else:
        logp = ()
    return Completion(tokens, logp, stops.text(tokens, reason), reason, version)


def _reason(written: Written, request: Request, stops: Stops) -> str:
    if written.finish == "length":
        return "max_tokens" if len(written.tokens) == request.max_new_tokens else "context"
    if written.finish == "abort":
        return "cancelled"
    if written.tokens and written.tokens[-1] in stops.end_token_ids:
        return "end_token"
    if isinstance(written.stop_reason, str) and written.stop_reason in stops.stop:
        return "stop_string"
    return f"error:vllm ended the turn by {written.stop_reason!r}, which is no end token and no stop text of sampling"
