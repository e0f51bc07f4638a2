"""Engines beside the native one: the contract for all of them, and what a script owes."""

from __future__ import annotations

import asyncio

import pytest
import torch
from standin import CONTEXT, FAST, PLAIN, Model, SglangModel, StandIn, ask, echo, fixed, slow_first

from burnish.config import EvalSampling, Sampling
from burnish.config.parts import Guide
from burnish.engines import Completion, Request
from burnish.engines.base import EngineError
from burnish.engines.pool import EnginePool
from burnish.engines.remote import EXTRAS, RemoteEngine
from burnish.engines.scripted import Line, ScriptedEngine
from burnish.engines.sglang import SglangEngine

pytest.importorskip("httpx2")
pytest_plugins = ("closing",)


def make_scripted(says, tokenizer, open_):
    return ScriptedEngine(
        lambda _, r: Line(tokens=tuple(t for t, _ in says(r.tokens)), logp_gen=tuple(lp for _, lp in says(r.tokens))),
        tokenizer, context_tokens=CONTEXT, logprobs=True,
    )


def make_remote(says, tokenizer, open_):
    server = open_(StandIn(slow_first(Model(tokenizer, says).openai)))
    return open_(RemoteEngine(
        server.url + "/v1", model="m", tokenizer=tokenizer, gives_token_ids=True, logprobs="as_sampled",
        knows=EXTRAS, context_tokens=CONTEXT, **FAST,
    ))


def make_sglang(says, tokenizer, open_, folder=None):
    server = open_(StandIn(slow_first(SglangModel(tokenizer, says).sglang)))
    return open_(SglangEngine(server.url, tokenizer, context_tokens=CONTEXT, folder=folder, **FAST))


def make_pool(says, tokenizer, open_):
    return open_(EnginePool([make_scripted(says, tokenizer, open_) for _ in range(3)]))


ENGINES = {"scripted": make_scripted, "remote": make_remote, "sglang": make_sglang, "pool": make_pool}
every_engine = pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)


@every_engine
def test_ids_and_log_probs_are_those_that_were_sampled(make, tokenizer, open_):
    """T5"""
    says = echo(tokenizer)
    for request, done in zip(asked := ask(tokenizer, "12+3", "abc"), make(says, tokenizer, open_).generate(asked, PLAIN), strict=True):
        assert list(zip(done.tokens, done.logp_gen, strict=True)) == says(request.tokens)
        assert (done.stop, done.version) == ("end_token", 0)


@every_engine
def test_each_completion_belongs_to_its_request(make, tokenizer, open_):
    """T10: 40 requests, answered in another order than they came, some of them alike."""
    texts = [f"{i % 17}+{i % 5}=" for i in range(40)]
    progress = []
    done = make(echo(tokenizer), tokenizer, open_).generate(
        ask(tokenizer, *texts), PLAIN, progress=lambda n, of: progress.append((n, of))
    )
    assert [(c.stop, c.text) for c in done] == [("end_token", t[::-1]) for t in texts]
    assert progress[-1] == (40, 40)


@every_engine
@pytest.mark.parametrize(
    ("written", "stop", "most", "text", "tokens", "reason"),
    [
        ("7\nmore", ("\n",), 12, "7", 2, "stop_string"),
        ("abcabd.", ("abd",), 12, "abc", 6, "stop_string"),
        ("aab", ("b", "ab"), 12, "a", 3, "stop_string"),
        ("no stop", ("?",), 4, "no s", 4, "max_tokens"),
        ("no stop", (), 12, "no stop", 8, "end_token"),
        ("no stop", (), 8, "no stop", 8, "end_token"),
        ("x", ("x",), 1, "", 1, "stop_string"),
        ("", (), 12, "", 1, "end_token"),
    ],
)
def test_how_turns_end(make, tokenizer, open_, written, stop, most, text, tokens, reason):
    """T18, also where the last token that is allowed is the one that ends the turn."""
    engine = make(fixed(tokenizer, written), tokenizer, open_)
    (done,) = engine.generate(ask(tokenizer, "1", most=most), Sampling(stop=stop, max_new_tokens=most))
    assert (done.text, len(done.tokens), len(done.logp_gen), done.stop) == (text, tokens, tokens, reason)


@every_engine
def test_several_end_tokens(make, tokenizer, open_):
    semicolon = tokenizer.get_vocab()[";"]
    both = Sampling(end_tokens=("<end>", ";"), max_new_tokens=12)
    for end in (semicolon, tokenizer.eos_token_id):
        (done,) = make(fixed(tokenizer, "ab", end=end), tokenizer, open_).generate(ask(tokenizer, "1"), both)
        assert (done.text, done.stop, done.tokens[-1]) == ("ab", "end_token", end)


@every_engine
def test_the_context_is_the_limit_and_a_prompt_beyond_it_an_error(make, tokenizer, open_):
    engine = make(fixed(tokenizer, "q" * CONTEXT), tokenizer, open_)
    asked = [Request((5,) * n, 1, 50) for n in (CONTEXT - 6, CONTEXT - 1, CONTEXT, 0)]
    fits, full, beyond, empty = engine.generate(asked, Sampling(max_new_tokens=50))
    assert (fits.stop, len(fits.tokens)) == ("context", 6)
    assert (full.stop, len(full.tokens)) == ("context", 1)
    assert (beyond.stop, beyond.tokens) == ("error:prompt_too_long", ())
    assert empty.stop == "error:empty_prompt"


@every_engine
def test_settings_that_are_not_honoured_are_refused(make, tokenizer, open_):
    engine = make(echo(tokenizer), tokenizer, open_)
    values = {
        "top_k": 5, "top_p": 0.5, "min_p": 0.1, "temperature": 0.5, "end_tokens": (";",), "stop": ("\n",), "logit_bias": {"a": 2.0},
        "repetition_penalty": 1.1, "banned_tokens": ("a",), "min_new_tokens": 2, "guide": Guide(regex="a+"), "max_new_tokens": 9,
    }
    assert values.keys() == Sampling.model_fields.keys()
    for name, value in values.items():
        sampling = Sampling(**{name: value})
        if name in engine.abilities.sampling:
            engine.generate(ask(tokenizer, "1"), sampling)
        else:
            with pytest.raises(EngineError, match=f"sampling.{name}"):
                engine.generate(ask(tokenizer, "1"), sampling)


@every_engine
def test_greedy_draws_are_certain(make, tokenizer, open_):
    engine = make(echo(tokenizer), tokenizer, open_)
    if isinstance(engine, ScriptedEngine | EnginePool):
        pytest.skip("says the log-probs of its script")
    (done,) = engine.generate(ask(tokenizer, "12"), EvalSampling(max_new_tokens=12))
    assert done.logp_gen == (0.0, 0.0, 0.0)


@every_engine
def test_no_requests_no_completions_and_close_twice(make, tokenizer, open_):
    engine = make(echo(tokenizer), tokenizer, open_)
    assert engine.generate([], PLAIN) == []
    engine.close()
    engine.close()


@every_engine
def test_a_running_event_loop_does_not_matter(make, tokenizer, open_):
    engine = make(echo(tokenizer), tokenizer, open_)

    async def notebook():
        return engine.generate(ask(tokenizer, "12"), PLAIN)

    assert asyncio.run(notebook())[0].text == "21"


def test_the_version_is_stamped(tokenizer, open_, tmp_path):
    """T11"""
    weights = {"w": torch.arange(6.0)}
    for engine in (
        make_scripted(echo(tokenizer), tokenizer, open_), make_pool(echo(tokenizer), tokenizer, open_),
        make_sglang(echo(tokenizer), tokenizer, open_, tmp_path),
    ):
        before = engine.generate(ask(tokenizer, "1", "2"), PLAIN)
        engine.load(7, iter(weights.items()))
        after = engine.generate(ask(tokenizer, "1", "2"), PLAIN)
        assert ({c.version for c in before}, {c.version for c in after}, engine.version) == ({0}, {7}, 7)


# scripts

def scripted(script, tokenizer, **values):
    return ScriptedEngine(script, tokenizer, **values)


def test_scripts_of_every_kind(tokenizer):
    tokens = tuple(tokenizer("5").input_ids)
    script = {"1": "one", "2": ["a", "b"], tokens: "five"}
    done = scripted(script, tokenizer).generate(ask(tokenizer, "1", "2", "5", "2", "1", "2", "9"), PLAIN)
    assert [c.text for c in done[:5]] == ["one", "a", "five", "b", "one"]
    assert [c.stop for c in done[5:]] == ["error:script: no answer to this prompt, or none left"] * 2
    assert not scripted(script, tokenizer).abilities.streams and scripted({"1": "x"}, tokenizer).abilities.streams
    listed = scripted(["x", "y"], tokenizer)
    assert [listed.generate(ask(tokenizer, "1"), PLAIN)[0].text for _ in range(2)] == ["x", "y"]
    assert listed.generate(ask(tokenizer, "1"), PLAIN)[0].stop.startswith("error:script")
    called = scripted(lambda prompt, request: f"{prompt}{request.stream}", tokenizer)
    assert [c.text for c in called.generate(ask(tokenizer, "a", "b"), PLAIN)] == ["a0", "b1"]
    with pytest.raises(EngineError, match="lambda"):
        scripted("a", tokenizer)


def test_log_probs_of_a_script_are_given_or_not_there(tokenizer):
    plain = scripted(["ab"], tokenizer)
    assert plain.generate(ask(tokenizer, "1"), PLAIN)[0].logp_gen == () and not plain.abilities.logprobs
    (done,) = scripted([Line("ab", logp_gen=(-1.0, -2.0, -3.0))], tokenizer, logprobs=True).generate(ask(tokenizer, "1", most=2), PLAIN)
    assert (done.logp_gen, done.stop) == ((-1.0, -2.0), "max_tokens")
    for line in (Line("ab", logp_gen=(-1.0, -2.0)), Line("ab")):
        assert "log-probs for 3 tokens" in scripted([line], tokenizer, logprobs=True).generate(ask(tokenizer, "1"), PLAIN)[0].stop


def test_recorded_completions_are_replayed(tiny_llama):
    """What the native engine wrote comes back as it was, and under a shorter limit cut."""
    from parts import engine_of

    tokenizer = tiny_llama.tokenizer
    asked = ask(tokenizer, "1", "22", "a b")
    recorded = engine_of(tiny_llama).generate(asked, PLAIN)
    failed = Completion((), (), "", "error:server: gone", 0)
    script = {r.tokens: c for r, c in zip(asked, recorded, strict=True)} | {"9": failed}
    engine = scripted(script, tokenizer, logprobs=True)
    assert engine.generate(asked, PLAIN) == recorded
    (short,) = engine.generate([Request(asked[0].tokens, 0, 3)], PLAIN)
    assert (short.tokens, short.logp_gen, short.stop) == (recorded[0].tokens[:3], recorded[0].logp_gen[:3], "max_tokens")
    assert engine.generate(ask(tokenizer, "9"), PLAIN) == [failed]


def test_a_script_that_is_wrong_is_told(tokenizer):
    def raises(prompt, request):
        raise ZeroDivisionError("oops")

    def dies(prompt, request):
        raise EngineError("gone")

    unended = [Line(tokens=(5, 6))]
    for script, told in ((raises, "ZeroDivisionError: oops"), ([3], "found 3"), (["ü"], "no token"), (unended, "end neither")):
        (done,) = scripted(script, tokenizer).generate(ask(tokenizer, "1"), PLAIN)
        assert done.stop.startswith("error:script") and told in done.stop
    with pytest.raises(EngineError, match="gone"):
        scripted(dies, tokenizer).generate(ask(tokenizer, "1"), PLAIN)
