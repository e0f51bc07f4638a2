"""Any server that speaks OpenAI's HTTP API, as an engine: judges, teachers, policies served elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from burnish.chat.template import by_ids, encode_reply
from burnish.config import Sampling
from burnish.engines.base import Abilities, Completion, EngineError, Request, check_sampling
from burnish.engines.calls import CallError, Calls
from burnish.engines.native.stops import Stops
from burnish.engines.served import failed, log_probs, token_ids, told_of, unserved, written
from burnish.types import Message

STANDARD = frozenset({"temperature", "top_p", "max_new_tokens", "stop"})
EXTRAS = {
    "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty", "logit_bias": "logit_bias",
    "end_tokens": "stop_token_ids",
}
"""Settings of Sampling that some servers know beyond the standard, and the names they go by there."""
SHAPES = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"})
"""Settings that change the distribution which a token is drawn from."""
MOST_BIAS = 100.0
"""Servers refuse a logit_bias beyond this, or move it back to it."""


class RemoteEngine:
    """A model behind /completions or /chat/completions of `base_url`, which ends in /v1 for most servers.

    tokenizer: of the policy, for `generate`; a judge that is asked by `chat` needs none. key_env: the name of the environment variable that
    holds the key. chat: `generate` sends a prompt as one user message to /chat/completions; else as it stands to /completions.
    gives_token_ids: the server takes a prompt as token ids and answers with them where return_token_ids is set, as vLLM does; without it
    text goes out and comes back, and the tokens of a completion are made of its text anew. logprobs: None asks for none; "raw" are those
    before temperature and filters, which OpenAI and vLLM tell, and so fit only draws without them; "as_sampled" those after them. Both need
    gives_token_ids. knows: the names of EXTRAS that the server takes. context_tokens: of the model, so that max_tokens fits. body: further
    fields of each call, as they are; one that is None takes a field out. max_tokens_name: what the server calls it. send_seed: the seed
    field is made of the request's stream. concurrency, timeout_s, tries, backoff_s: as in Calls.

    The server's weights are those of `version` for good.
    """

    abilities = Abilities(
        logprobs=False, shares_weights=False, token_ids=False, streams=False, publish=False, live=False, sampling=STANDARD
    )

    def __init__(
        self, base_url: str, *, model: str, tokenizer: Any = None, key_env: str | None = None, chat: bool = False,
        gives_token_ids: bool = False, logprobs: Literal["raw", "as_sampled"] | None = None, knows: Iterable[str] = (),
        context_tokens: int | None = None, version: int = 0, body: Mapping[str, Any] | None = None, max_tokens_name: str = "max_tokens",
        send_seed: bool = False, concurrency: int = 32, timeout_s: float = 300.0, tries: int = 5, backoff_s: float = 0.5,
    ) -> None:
        knows = frozenset(knows)
        if unknown := sorted(knows - EXTRAS.keys()):
            raise EngineError(f"knows: {unknown} cannot be sent; of the settings beyond the standard these can: {sorted(EXTRAS)}")
        if logprobs not in (None, "raw", "as_sampled"):
            raise EngineError(f"logprobs is {logprobs!r}; it is None, 'raw' or 'as_sampled'")
        if logprobs and not gives_token_ids:
            raise EngineError("logprobs need gives_token_ids: without the server's tokens it is not known whose they are")
        if gives_token_ids and chat:
            raise EngineError("a prompt of token ids goes to /completions; leave out chat or gives_token_ids")
        if (gives_token_ids or "logit_bias" in knows) and tokenizer is None:
            raise EngineError("gives_token_ids and a logit_bias need the tokenizer")
        honours = (STANDARD | knows) - (SHAPES if logprobs == "raw" else frozenset())
        self.abilities = replace(self.abilities, logprobs=logprobs is not None, token_ids=gives_token_ids, sampling=honours)
        self.model, self.tokenizer, self.by_chat, self.context_tokens, self.version = model, tokenizer, chat, context_tokens, version
        self.knows, self.body, self.max_tokens_name, self.send_seed = knows, dict(body or {}), max_tokens_name, send_seed
        self.calls = Calls(base_url, key_env=key_env, concurrency=concurrency, timeout_s=timeout_s, tries=tries, backoff_s=backoff_s)

    def check(self, sampling: Sampling) -> None:
        """Raises EngineError for settings that this server is not known to honour. Calls nothing."""
        check_sampling(self.abilities, sampling, name="remote")
        if beyond := [token for token, value in sampling.logit_bias.items() if abs(value) > MOST_BIAS]:
            raise EngineError(f"sampling.logit_bias of {beyond[0]!r} is {sampling.logit_bias[beyond[0]]}; servers take {MOST_BIAS} at most")

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests; see Engine. Log-probs are empty where the server left one out."""
        self.check(sampling)
        if self.tokenizer is None:
            raise EngineError("the remote engine was made without a tokenizer: it can be asked by chat only")
        sampling = by_ids(sampling, self.tokenizer)
        stops = Stops(self.tokenizer, end_token_ids=sampling.end_tokens, stop=sampling.stop)
        done = [unserved(r.tokens, context_tokens=self.context_tokens, version=self.version) for r in requests]
        asked = sorted((i for i, c in enumerate(done) if c is None), key=lambda i: -requests[i].priority)
        limits = {i: self._limit(requests[i]) for i in asked}
        bodies = [self._of_request(requests[i], sampling, stops, limits[i]) for i in asked]
        path = "/chat/completions" if self.by_chat else "/completions"
        answers = self.calls.post_all(path, bodies, told_of(progress, len(requests)))
        for i, answer in zip(asked, answers, strict=True):
            read = self._read_tokens if self.abilities.token_ids else self._read_text
            done[i] = self._completion(answer, lambda a, i=i, read=read: read(a, requests[i], sampling, stops, limits[i]))
        return done

    def chat(
        self, conversations: Sequence[Sequence[Message]], sampling: Sampling, *, progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """What the server's model answers to each conversation, for judges. Completions have a text and no tokens."""
        self.check(sampling)
        sampling = sampling if self.tokenizer is None else by_ids(sampling, self.tokenizer)
        most = sampling.max_new_tokens
        settings = self._settings(sampling, most)
        bodies = [self._with_body({**settings, "messages": list(messages)}) for messages in conversations]
        answers = self.calls.post_all("/chat/completions", bodies, progress)
        return [self._completion(a, lambda a: self._said(a, sampling, most, most, by_chat=True)[0]) for a in answers]

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Raises EngineError for weights, and for a version that is not the server's."""
        if weights is not None or version != self.version:
            raise EngineError(f"a remote engine keeps the weights of version {self.version}; it cannot take those of version {version}")

    def close(self) -> None:
        self.calls.close()

    def _limit(self, request: Request) -> int:
        room = self.context_tokens - len(request.tokens) if self.context_tokens else request.max_new_tokens
        return min(request.max_new_tokens, room)

    def _settings(self, sampling: Sampling, limit: int) -> dict[str, Any]:
        out: dict[str, Any] = {"model": self.model, self.max_tokens_name: limit, "temperature": sampling.temperature}
        for name, default in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
            if getattr(sampling, name) != default:
                out[EXTRAS.get(name, name)] = getattr(sampling, name)
        if sampling.logit_bias:
            out[EXTRAS["logit_bias"]] = {str(token): value for token, value in sampling.logit_bias.items()}
        if sampling.stop:
            out["stop"] = list(sampling.stop)
        return out

    def _of_request(self, request: Request, sampling: Sampling, stops: Stops, limit: int) -> dict[str, Any]:
        out = self._settings(sampling, limit)
        if self.abilities.token_ids:
            out |= {"prompt": list(request.tokens), "return_token_ids": True}
        elif self.by_chat:
            out["messages"] = [{"role": "user", "content": self.tokenizer.decode(list(request.tokens), skip_special_tokens=True)}]
        else:
            out["prompt"] = stops.decode(request.tokens)
        if "end_tokens" in self.knows:
            out |= {EXTRAS["end_tokens"]: list(sampling.end_tokens), "ignore_eos": True}
        if self.abilities.logprobs:
            out["logprobs"] = 1
        if self.send_seed:
            out["seed"] = request.stream % 2**31
        return self._with_body(out)

    def _with_body(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in (fields | self.body).items() if value is not None}

    def _completion(self, answer: Any, read: Callable[[Any], Completion]) -> Completion:
        try:
            if isinstance(answer, CallError):
                raise answer
            return read(answer)
        except CallError as error:
            return failed(error, version=self.version)

    def _read_tokens(self, answer: Any, request: Request, sampling: Sampling, stops: Stops, limit: int) -> Completion:
        choice, finish = _choice(answer)
        tokens = token_ids(choice.get("token_ids"), name="token_ids", limit=limit)
        prompt = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
        if prompt is not None and prompt != list(request.tokens):
            raise CallError("prompt_token_ids are not those of the prompt that was sent", at_server=True)
        told = choice.get("logprobs") if self.abilities.logprobs else None
        logp = log_probs(told.get("token_logprobs"), count=len(tokens)) if isinstance(told, dict) else ()
        return written(
            tokens, logp, sampling=sampling, stops=stops, by_length=finish == "length", max_new_tokens=request.max_new_tokens,
            version=self.version,
        )

    def _read_text(self, answer: Any, request: Request, sampling: Sampling, stops: Stops, limit: int) -> Completion:
        said, whole = self._said(answer, sampling, limit, request.max_new_tokens, by_chat=self.by_chat)
        try:
            tokens = encode_reply(self.tokenizer, whole, specials=False)
        except ValueError as error:
            raise CallError(f"a text that the policy's tokenizer cannot write: {error}", at_server=False) from error
        if said.stop == "end_token":
            tokens.append(sampling.end_tokens[0])
        return Completion(tuple(tokens), (), said.text, said.stop, self.version)

    def _said(self, answer: Any, sampling: Sampling, limit: int, max_new_tokens: int, *, by_chat: bool) -> tuple[Completion, str]:
        """The completion without tokens, and its text with the stop string, where it is known which one it was."""
        choice, finish = _choice(answer)
        holder = choice.get("message") if by_chat else choice
        text = holder.get("content" if by_chat else "text") if isinstance(holder, dict) else None
        if not isinstance(text, str):
            raise CallError("the answer holds no text", at_server=True)
        if found := [(at, s) for s in sampling.stop if (at := text.find(s)) >= 0]:
            at, which = min(found)
            return Completion((), (), text[:at], "stop_string", self.version), text[:at] + which
        if finish == "length":
            usage = answer.get("usage")
            count = usage.get("completion_tokens") if isinstance(usage, dict) else None
            full = (count if type(count) is int else limit) < max_new_tokens
            stop = "context" if full else "max_tokens"
            return Completion((), (), text, stop, self.version), text
        matched = choice.get("stop_reason")
        if matched in sampling.stop or (sampling.stop and "stop_reason" not in choice):
            which = matched if matched in sampling.stop else sampling.stop[0] if len(sampling.stop) == 1 else ""
            return Completion((), (), text, "stop_string", self.version), text + which
        return Completion((), (), text, "end_token", self.version), text


def _choice(answer: Any) -> tuple[dict[str, Any], str]:
    """The one choice of an answer and how it says that it ended, which is stop or length. Raises CallError."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        raise CallError("the answer holds no choices", at_server=True)
    if len(choices) != 1:
        raise CallError(f"the answer holds {len(choices)} choices; one was asked for", at_server=True)
    finish = choices[0].get("finish_reason")
    if finish in ("content_filter", "tool_calls", "function_call"):
        raise CallError(f"finish_reason is {finish}", at_server=False)
    if finish not in ("stop", "length"):
        raise CallError(f"finish_reason is {finish!r}: the answer is not whole", at_server=True)
    return choices[0], finish
