"""An engine that answers from a script: for tests of recipes and environments, and to replay recorded completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from burnish.chat.template import encode_reply, end_token_ids
from burnish.config import Sampling
from burnish.engines.base import Abilities, Completion, EngineError, Request, check_sampling
from burnish.engines.native.stops import Stops

HONOURED = frozenset({
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias", "max_new_tokens", "stop", "end_tokens",
})
"""The script says what was drawn, so what shapes a draw is taken as it is."""


@dataclass(frozen=True, slots=True)
class Line:
    """One answer: a text, behind which the end token follows, or the tokens as they are. logp_gen, where known, is one a token."""

    text: str | None = None
    tokens: tuple[int, ...] = ()
    logp_gen: tuple[float, ...] = ()


Answer = str | Line | Completion
Script = Mapping[str | tuple[int, ...], Answer | Sequence[Answer]] | Sequence[Answer] | Callable[[str, Request], Answer]


class ScriptedEngine:
    """The script is a mapping from a prompt, as text or tokens, to its answer, or to several that are given in turn; a list of answers in
    the order of the requests; or a function of (prompt as text, request).

    An answer ends as a sampled one would: by end token, stop string, max_new_tokens or context. A recorded Completion is replayed: its
    tokens and log-probs, under the stops of the sampling; one that failed fails. A prompt that the script does not know, a list that is
    used up and a function that raises give error:script completions; an EngineError of the function is the engine's own.

    logprobs: the script brings them with every answer; one without is an error. It then has the ability, else not.
    """

    def __init__(self, script: Script, tokenizer: Any, *, context_tokens: int | None = None, logprobs: bool = False) -> None:
        if isinstance(script, str):
            raise EngineError("a script is a mapping, a list or a function; for one answer to all, give lambda prompt, request: answer")
        in_turn = isinstance(script, Sequence) or (
            isinstance(script, Mapping) and any(not isinstance(v, Answer) for v in script.values())
        )
        self.abilities = Abilities(logprobs=logprobs, shares_weights=False, streams=not in_turn, live=False, sampling=HONOURED)
        self.script, self.tokenizer, self.context_tokens = script, tokenizer, context_tokens
        self.version = 0
        self._given: Counter[Any] = Counter()

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests; see Engine."""
        check_sampling(self.abilities, sampling, name="scripted")
        stops = Stops(self.tokenizer, end_token_ids=end_token_ids(self.tokenizer, sampling.end_tokens), stop=sampling.stop)
        done = []
        for request in requests:
            try:
                done.append(self._answer(request, stops, sampling))
            except EngineError:
                raise
            except Exception as error:
                done.append(self._failed(f"script: {type(error).__name__}: {error}"))
            if progress:
                progress(len(done), len(requests))
        return done

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Completions are of `version` from now on. The weights are not looked at."""
        self.version = version

    def close(self) -> None: ...

    def _answer(self, request: Request, stops: Stops, sampling: Sampling) -> Completion:
        room = None if self.context_tokens is None else self.context_tokens - len(request.tokens)
        if not request.tokens or (room is not None and room < 1):
            return self._failed("empty_prompt" if not request.tokens else "prompt_too_long")
        answer = self._look_up(request, stops.decode(request.tokens))
        recorded = None
        if answer is None:
            return self._failed("script: no answer to this prompt, or none left")
        if isinstance(answer, Completion):
            if answer.stop.startswith("error:") or answer.stop == "cancelled":
                return replace(answer, version=self.version)
            recorded, answer = answer.stop, Line(tokens=answer.tokens, logp_gen=answer.logp_gen)
        tokens, logp = self._tokens(answer, stops, sampling)
        limit = request.max_new_tokens if room is None else min(request.max_new_tokens, room)
        head: list[int] = []
        for token in tokens[:limit]:
            head.append(token)
            if reason := stops.after(head):
                return self._completion(tuple(head), logp[: len(head)], stops.text(head, reason), reason)
        if len(tokens) < limit and recorded in ("grammar", "context"):
            return self._completion(tokens, logp, stops.decode(tokens), recorded)
        if len(tokens) < limit:
            return self._failed(f"script: the answer's {len(tokens)} tokens end neither the turn nor the {limit} that it may have")
        tokens, logp = tokens[:limit], logp[:limit]
        return self._completion(tokens, logp, stops.decode(tokens), "max_tokens" if limit == request.max_new_tokens else "context")

    def _look_up(self, request: Request, text: str) -> Answer | None:
        if callable(self.script):
            return self.script(text, request)
        if isinstance(self.script, Mapping):
            key = request.tokens if request.tokens in self.script else text
            found = self.script.get(key)
            return found if found is None or isinstance(found, Answer) else self._next(found, key)
        return self._next(self.script, None)

    def _next(self, answers: Sequence[Answer], key: Any) -> Answer | None:
        n = self._given[key]
        self._given[key] += 1
        return answers[n] if n < len(answers) else None

    def _tokens(self, answer: Answer, stops: Stops, sampling: Sampling) -> tuple[tuple[int, ...], tuple[float, ...]]:
        line = Line(answer) if isinstance(answer, str) else answer
        if not isinstance(line, Line) or (line.text is None) == (not line.tokens):
            raise TypeError(f"an answer is a text, a Completion, or a Line of text or tokens; found {answer!r}")
        tokens = line.tokens
        if line.text is not None:
            tokens = (*encode_reply(self.tokenizer, line.text), end_token_ids(self.tokenizer, sampling.end_tokens)[0])
        if len(line.logp_gen) not in (0, len(tokens)) or (self.abilities.logprobs and not line.logp_gen):
            raise ValueError(f"{len(line.logp_gen)} log-probs for {len(tokens)} tokens, the end token among them")
        return tuple(tokens), tuple(line.logp_gen)

    def _completion(self, tokens: tuple[int, ...], logp: tuple[float, ...], text: str, stop: str) -> Completion:
        return Completion(tokens, logp, text, stop, self.version)

    def _failed(self, what: str) -> Completion:
        return Completion((), (), "", f"error:{what}", self.version)
