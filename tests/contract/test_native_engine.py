"""What the native engine does beyond the protocol: shared pages, requests that come and go, weights in flight, guesses, guides."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch
from conftest import ALPHABET
from parts import can_compile, engine_of, state_of

from burnish.config import Lora, Model, Sampling, Scratch
from burnish.engines import Request
from burnish.engines.base import EngineError
from burnish.engines.native.drafts import Lookup, Payoff
from burnish.engines.native.pages import PAGE_TOKENS
from burnish.engines.native.sampler import stream_key
from burnish.models.load import load

compiled = pytest.mark.skipif(not can_compile(), reason="no compiled step on this machine")
STEPS = [pytest.param({"compiled": True}, id="compiled", marks=compiled), pytest.param({"compiled": False}, id="torch")]
LOOSE = [STEPS[0], pytest.param({"compiled": False, "batch_invariant": False}, id="torch")]
"""Steps that reuse prefixes of other requests."""
PLAIN = Sampling(max_new_tokens=12, banned_tokens=("<end>",))


def some(num: int, *, prompt_tokens: int = 20, new: int = 12, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(tuple(rng.randrange(5, 70) for _ in range(prompt_tokens)), stream_key(seed, f"task {i}", 0), new) for i in range(num)
    ]


def finish(stream, done=None):
    done = {} if done is None else done
    while stream.live or stream.ready:
        done |= dict(stream.advance())
    return done


def near(a, b, room=1e-5):
    assert [c.tokens for c in a] == [c.tokens for c in b]
    for one, other in zip(a, b, strict=True):
        assert one.logp_gen == pytest.approx(other.logp_gen, abs=room)


@compiled
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_compiled_step_is_the_torch_step(make_tiny, name):
    loaded = make_tiny(name)
    sampling = Sampling(max_new_tokens=40, top_p=0.95, temperature=0.8)
    asked = some(9, prompt_tokens=37, new=40)
    near(engine_of(loaded, compiled=True).generate(asked, sampling), engine_of(loaded, compiled=False).generate(asked, sampling))


@compiled
@pytest.mark.parametrize(
    ("model_type", "extra"),
    [("qwen2", {}), ("mistral", {"sliding_window": None}), ("mistral", {"sliding_window": 9}), ("llama", {"head_dim": 32}),
     ("qwen3", {"head_dim": 48, "num_key_value_heads": 4}), ("llama", {"attention_bias": True})],
    ids=["qwen2", "mistral", "mistral-window", "llama-wide-heads", "qwen3-48", "llama-bias"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_family(model_type, extra, dtype):
    """Biases on queries, keys and values, a window across pages, head sizes of other groups; or told that it does not go."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    loaded = load(Model(scratch=Scratch(alphabet=ALPHABET, model_type=model_type, config={**size, **extra})), seed=0)
    state_of(loaded, dtype=dtype)
    with torch.no_grad():
        for name, p in loaded.module.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.5)
    asked = some(4, prompt_tokens=37, new=20)
    if extra.get("attention_bias"):
        with pytest.raises(EngineError, match="biases elsewhere than on queries, keys and values"):
            engine_of(loaded, compiled=True)
        return
    sampling = Sampling(max_new_tokens=20, temperature=0.0)
    fast, plain = (engine_of(loaded, compiled=way).generate(asked, sampling) for way in (True, False))
    if dtype == "float32":
        near(fast, plain)
    draws = Sampling(max_new_tokens=20)
    fast, plain = (engine_of(loaded, compiled=way).generate(asked, draws) for way in (True, False))
    same = [(x, y) for x, y in zip(fast, plain, strict=True) if x.tokens == y.tokens]
    gaps = [abs(a - b) for x, y in same for a, b in zip(x.logp_gen, y.logp_gen, strict=True)]
    assert len(gaps) > 30
    assert max(gaps) < (1e-5 if dtype == "float32" else 0.05)


@compiled
def test_an_adapter_is_sampled_with(make_tiny):
    pytest.importorskip("peft")
    loaded = make_tiny("llama", lora=Lora(rank=4, alpha=16.0))
    asked, sampling = some(4), Sampling(max_new_tokens=12, banned_tokens=("<end>",))
    plain = engine_of(loaded, compiled=True).generate(asked, sampling)
    with torch.no_grad():
        for name, p in loaded.module.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    fast = engine_of(loaded, compiled=True).generate(asked, sampling)
    near(fast, engine_of(loaded, compiled=False).generate(asked, sampling))
    assert [c.logp_gen for c in plain] != [c.logp_gen for c in fast]


@compiled
def test_sequences_as_long_as_the_context(make_tiny):
    loaded = make_tiny("llama")
    asked = some(3, prompt_tokens=150, new=200)
    sampling = Sampling(max_new_tokens=200, banned_tokens=("<end>",))
    done = engine_of(loaded, compiled=True).generate(asked, sampling)
    assert [(c.stop, len(c.tokens)) for c in done] == [("context", 106)] * 3
    near(done, engine_of(loaded, compiled=False).generate(asked, sampling), room=3e-5)


@pytest.mark.parametrize("way", STEPS)
def test_a_group_holds_its_prompt_once(tiny_llama, way):
    """8 samples of 65 tokens: 5 pages of prompt for all, the last of them partly filled and so copied by each."""
    engine = engine_of(tiny_llama, **way)
    prompt = some(1, prompt_tokens=4 * PAGE_TOKENS + 1)[0].tokens
    asked = [Request(prompt, stream_key(0, "task", n), 12) for n in range(8)]
    with engine.stream(asked) as stream:
        ids = [stream.submit(r, PLAIN) for r in asked]
        stream.advance()
        pages = engine.scheduler.pages
        held = sum(n > 0 for n in pages.holders)
        assert len(stream.live) == 8
        assert held == 4 + 8
        assert stream.num_prompt_rows == len(prompt)
        done = finish(stream)
    alone = engine_of(tiny_llama, **way)
    assert [done[i] for i in ids] == [alone.generate([r], PLAIN)[0] for r in asked]


@pytest.mark.parametrize("way", LOOSE)
def test_turns_of_a_conversation_read_only_what_is_new(tiny_llama, way):
    engine = engine_of(tiny_llama, **way)
    (first,) = some(1, prompt_tokens=48)
    written = engine.generate([first], PLAIN)[0]
    second = Request((*first.tokens, *written.tokens, 9, 8, 7), first.stream, 12)
    with engine.stream([second]) as stream:
        id_ = stream.submit(second, PLAIN)
        done = finish(stream)
    assert stream.num_prompt_rows <= PAGE_TOKENS + 3
    fresh = engine_of(tiny_llama, **way).generate([second], PLAIN)
    if way["compiled"]:
        assert [done[id_]] == fresh
    else:
        near([done[id_]], fresh)


@pytest.mark.parametrize("way", LOOSE)
def test_a_prefix_never_outlives_its_weights(make_tiny, way):
    loaded = make_tiny("llama")
    engine = engine_of(loaded, **way)
    asked = some(4, prompt_tokens=40)
    before = engine.generate(asked, PLAIN)
    with torch.no_grad():
        for p in loaded.module.parameters():
            p.mul_(1.1)
    engine.load(1)
    with engine.stream():
        assert not engine.scheduler.pages.known
    after = engine.generate(asked, PLAIN)
    near(after, engine_of(loaded, **way).generate(asked, PLAIN), room=0 if way["compiled"] else 1e-5)
    assert [c.logp_gen for c in before] != [c.logp_gen for c in after]


@pytest.mark.parametrize("way", LOOSE)
def test_weights_changed_without_a_word_are_seen(make_tiny, way):
    loaded = make_tiny("llama")
    engine = engine_of(loaded, **way)
    asked = some(2, prompt_tokens=40)
    engine.generate(asked, PLAIN)
    with torch.no_grad():
        loaded.module.model.layers[0].mlp.up_proj.weight.mul_(-1.5)
    near(engine.generate(asked, PLAIN), engine_of(loaded, **way).generate(asked, PLAIN), room=0 if way["compiled"] else 1e-5)


# weights in flight

def change(loaded, factor):
    with torch.no_grad():
        for layer in loaded.module.model.layers:
            layer.mlp.down_proj.weight.mul_(factor)


@pytest.mark.parametrize("way", STEPS)
@pytest.mark.parametrize("mode", ["continue", "read_again"])
def test_new_weights_between_two_steps(make_tiny, way, mode):
    """Tokens before the change are of the old weights and those after of the new ones, each stamped; nothing reused crosses over."""
    loaded = make_tiny("llama")
    engine = engine_of(loaded, slots=4, new_weights=mode, drafts="never", **way)
    asked = some(6, prompt_tokens=30, new=20)
    sampling = Sampling(max_new_tokens=20, banned_tokens=("<end>",))
    old = engine.generate(asked, sampling)
    engine.scheduler.pages.forget()
    with engine.stream(asked) as stream:
        ids = [stream.submit(r, sampling) for r in asked]
        for _ in range(9):
            stream.advance()
        change(loaded, 3.0)
        engine.load(5)
        done = finish(stream)
    new = engine_of(loaded, **way).generate(asked, sampling)
    for r, id_, before, after in zip(asked, ids, old, new, strict=True):
        c = done[id_]
        if not c.versions:
            assert c.version == 5
            assert c == type(c)(after.tokens, after.logp_gen, after.text, after.stop, 5)
            continue
        n = c.versions.index(5)
        assert c.version == 0
        assert c.versions == (0,) * n + (5,) * (20 - n)
        assert c.tokens[:n] == before.tokens[:n]
        assert c.logp_gen[:n] == before.logp_gen[:n]
        rest = engine_of(loaded, **way).generate([Request((*r.tokens, *c.tokens[:n]), r.stream, 20 - n)], sampling)[0]
        read_anew = c.tokens[n:] == rest.tokens and c.logp_gen[n:] == pytest.approx(rest.logp_gen, abs=1e-5)
        assert read_anew == (mode == "read_again")
    assert sum(bool(done[i].versions) for i in ids) == 4


@pytest.mark.parametrize("way", LOOSE)
def test_what_was_written_over_a_change_is_nobodys_prefix(make_tiny, way):
    loaded = make_tiny("llama")
    engine = engine_of(loaded, drafts="never", **way)
    (one,) = some(1, prompt_tokens=33, new=20)
    sampling = Sampling(max_new_tokens=20, banned_tokens=("<end>",))
    with engine.stream([one]) as stream:
        stream.submit(one, sampling)
        for _ in range(5):
            stream.advance()
        change(loaded, 3.0)
        engine.load(1)
        (mixed,) = finish(stream).values()
    again = Request((*one.tokens, *mixed.tokens), 1, 5)
    near(engine.generate([again], sampling), engine_of(loaded, **way).generate([again], sampling))


def test_weights_given_by_name(make_tiny):
    source, target = make_tiny("llama"), make_tiny("llama")
    change(source, 2.0)
    engine = engine_of(target)
    asked = some(3)
    engine.load(3, source.module.state_dict().items())
    expected = engine_of(source).generate(asked, PLAIN)
    assert [(c.tokens, c.logp_gen, c.version) for c in engine.generate(asked, PLAIN)] == [(c.tokens, c.logp_gen, 3) for c in expected]


def test_weights_that_do_not_fit_change_nothing(make_tiny):
    loaded = make_tiny("llama")
    engine = engine_of(loaded)
    before = engine.generate(some(2), PLAIN)
    whole = dict(loaded.module.state_dict())
    name = "model.layers.0.mlp.down_proj.weight"
    for wrong, text in (
        ({n: t for n, t in whole.items() if n != name}, f"no {name}"),
        (whole | {"model.layers.9.x": torch.zeros(2)}, "model.layers.9.x is unknown"),
        (whole | {name: torch.zeros(2, 3)}, f"{name} is \\[2, 3\\], not"),
    ):
        with pytest.raises(EngineError, match=text):
            engine.load(9, wrong.items())
    assert engine.generate(some(2), PLAIN) == before


def test_a_missing_norm_is_told_of_tied_models_too(make_tiny):
    loaded = make_tiny("llama_tied")
    engine = engine_of(loaded)
    tied = {n: t for n, t in loaded.module.state_dict().items() if n != "lm_head.weight"}
    engine.load(1, tied.items())
    with pytest.raises(EngineError, match=r"no model\.norm\.weight"):
        engine.load(2, ((n, t) for n, t in tied.items() if n != "model.norm.weight"))


# requests that come and go

@pytest.mark.parametrize("way", STEPS)
def test_come_and_go(tiny_llama, way):
    """Whatever was cancelled beside them and whenever they came: the same completions, and nothing is left behind."""
    engine = engine_of(tiny_llama, slots=5, **way)
    asked = some(30, prompt_tokens=21)
    expected = engine_of(tiny_llama, **way).generate(asked, PLAIN)
    rng, waiting, ids, cancelled, done = random.Random(1), list(range(30)), {}, set(), {}
    with engine.stream(asked) as stream:
        while waiting or stream.live:
            for _ in range(min(rng.randrange(4), len(waiting))):
                at = waiting.pop(0)
                ids[at] = stream.submit(asked[at], PLAIN)
            if stream.live and rng.random() < 0.2:
                victim = rng.choice(list(stream.live))
                got = stream.cancel(victim)
                assert got.stop == "cancelled"
                cancelled.add(victim)
                assert stream.cancel(victim) is None
            done |= dict(stream.advance())
    assert cancelled
    for at, id_ in ids.items():
        assert (id_ in done) != (id_ in cancelled)
        if id_ in done:
            assert done[id_] == expected[at]
    pages = engine.scheduler.pages
    assert pages.promised == 0
    assert not any(pages.holders)
    assert len(pages.free) + len(pages.idle) == pages.num_pages
    assert sorted(engine.scheduler.free_slots) == list(range(engine.scheduler.slots))
    assert not engine.scheduler.alike


def test_a_cancelled_request_gives_what_it_has(tiny_llama):
    engine = engine_of(tiny_llama)
    (one,) = some(1)
    whole = engine.generate([one], PLAIN)[0]
    with engine.stream([one]) as stream:
        id_ = stream.submit(one, PLAIN)
        for _ in range(5):
            stream.advance()
        running = stream.so_far(id_)
        assert (running.stop, running.tokens) == ("running", whole.tokens[: len(running.tokens)])
        got = stream.cancel(id_)
    assert 0 < len(got.tokens) < 12
    assert (got.tokens, got.logp_gen) == (whole.tokens[: len(got.tokens)], whole.logp_gen[: len(got.tokens)])
    assert stream.so_far(id_) is None


@pytest.mark.parametrize("way", LOOSE)
def test_a_cancelled_request_leaves_the_prefixes_of_others_as_they_are(tiny_llama, way):
    engine = engine_of(tiny_llama, **way)
    (one,) = some(1, prompt_tokens=40)
    first = engine.generate([one], PLAIN)
    with engine.stream([one]) as stream:
        id_ = stream.submit(one, PLAIN)
        stream.advance()
        stream.cancel(id_)
    near(engine.generate([one], PLAIN), first)


def test_higher_priority_starts_first(tiny_llama):
    engine = engine_of(tiny_llama, slots=1)
    asked = some(4)
    ranked = [Request(r.tokens, r.stream, r.max_new_tokens, priority=p) for r, p in zip(asked, (0, 0, 5, 1), strict=True)]
    order = []
    with engine.stream(ranked) as stream:
        for r in ranked:
            stream.submit(r, PLAIN)
        while stream.live:
            order += [id_ for id_, _ in stream.advance()]
    assert order == [2, 3, 0, 1]


@pytest.mark.parametrize("way", STEPS)
def test_beyond_the_cache_requests_wait_and_one_too_large_for_it_is_told(tiny_llama, way):
    engine = engine_of(tiny_llama, cache_tokens=5 * PAGE_TOKENS, **way)
    asked = some(12, prompt_tokens=20)
    most = 0
    with engine.stream(asked) as stream:
        ids = [stream.submit(r, PLAIN) for r in asked]
        large = stream.submit(some(1, prompt_tokens=90)[0], PLAIN)
        done = dict(stream.advance())
        while stream.live:
            most = max(most, len(engine.scheduler.running))
            assert engine.scheduler.pages.room >= 0
            done |= dict(stream.advance())
    assert most == 2
    assert done[large].stop == "error:no_room_in_cache"
    assert [done[i] for i in ids] == engine_of(tiny_llama, **way).generate(asked, PLAIN)


def test_slots_stay_full_until_the_queue_is_empty(tiny_llama):
    """Lengths with a long tail, prompts read beside the newest tokens: a freed slot is taken in the next step."""
    engine = engine_of(tiny_llama, slots=8, rows_per_step=64)
    rng = random.Random(0)
    asked = [Request(r.tokens, r.stream, min(int(rng.lognormvariate(3, 1)) + 1, 200)) for r in some(64, prompt_tokens=8)]
    sampling = Sampling(max_new_tokens=200, banned_tokens=("<end>",))
    busy = steps = 0
    with engine.stream(asked) as stream:
        for r in asked:
            stream.submit(r, sampling)
        while stream.live:
            stream.advance()
            if engine.scheduler.num_waiting:
                busy, steps = busy + len(engine.scheduler.running), steps + 1
    assert busy / (8 * steps) > 0.9


def test_several_samplings_in_one_stream(tiny_llama):
    asked = some(6)
    kinds = [PLAIN, Sampling(temperature=0.0, max_new_tokens=12), Sampling(top_k=3, repetition_penalty=1.3, max_new_tokens=12)]
    engine = engine_of(tiny_llama)
    with engine.stream(asked) as stream:
        ids = [stream.submit(r, kinds[i % 3]) for i, r in enumerate(asked)]
        done = finish(stream)
    for i, r in enumerate(asked):
        assert done[ids[i]] == engine_of(tiny_llama).generate([r], kinds[i % 3])[0]


@pytest.mark.parametrize("way", STEPS)
def test_several_samplings_of_one_prompt(tiny_llama, way):
    """Their first tokens come from the same logits, which one of them may not change for the others."""
    (one,) = some(1)
    asked = [Request(one.tokens, n, 12) for n in range(6)]
    kinds = [Sampling(banned_tokens=tuple(range(2, 40)), max_new_tokens=12), Sampling(max_new_tokens=12), Sampling(logit_bias={50: 9.0})]
    engine = engine_of(tiny_llama, **way)
    with engine.stream(asked) as stream:
        ids = [stream.submit(r, kinds[i % 3]) for i, r in enumerate(asked)]
        done = finish(stream)
    for i, r in enumerate(asked):
        assert done[ids[i]] == engine_of(tiny_llama, **way).generate([r], kinds[i % 3])[0]


@pytest.mark.parametrize("way", STEPS)
def test_what_cannot_run_is_told_and_hurts_nobody(tiny_llama, way):
    engine = engine_of(tiny_llama, **way)
    (good,) = some(1)
    wrong = [Request((5, 999_999), 1, 3), Request((5, -1), 1, 3), Request((5,), -1, 3), Request((5,), 1, 0)]
    done = engine.generate([*wrong, good], PLAIN)
    assert [c.stop for c in done[:4]] == ["error:unknown_token"] * 2 + ["error:stream_beyond_64_bits", "error:no_tokens_asked"]
    assert done[4] == engine_of(tiny_llama, **way).generate([good], PLAIN)[0]


@pytest.mark.parametrize("way", STEPS)
def test_closed_and_used_again_and_a_stream_that_was_left(tiny_llama, way):
    engine = engine_of(tiny_llama, **way)
    asked = some(6, prompt_tokens=50)
    first = engine.generate(asked, PLAIN)
    old = engine.stream()
    engine.close()
    with pytest.raises(EngineError, match="this stream was left"):
        old.submit(asked[0], PLAIN)
    assert engine.generate(asked[:1], PLAIN) == first[:1]
    with pytest.raises(EngineError, match="this stream was left"):
        old.advance()


@compiled
def test_a_window_is_for_the_layers_that_have_one(make_tiny):
    loaded = make_tiny("llama")
    loaded.module.config.sliding_window = 8
    loaded.module.config.layer_types = ["full_attention"] * loaded.module.config.num_hidden_layers
    asked = some(2, prompt_tokens=40)
    near(engine_of(loaded, compiled=True).generate(asked, PLAIN), engine_of(loaded, compiled=False).generate(asked, PLAIN))


def test_a_minimum_without_any_end_token(tiny_llama):
    sampling = Sampling(min_new_tokens=3, end_tokens=(), stop=("a",), max_new_tokens=6)
    assert all(len(c.tokens) > 3 for c in engine_of(tiny_llama).generate(some(4), sampling))


def test_one_stream_at_a_time(tiny_llama):
    engine = engine_of(tiny_llama)
    with engine.stream() as stream:
        stream.submit(some(1)[0], PLAIN)
        with pytest.raises(EngineError, match="a stream of this engine is open"):
            engine.generate(some(1), PLAIN)
    assert engine.generate(some(1), PLAIN)


# guesses

@pytest.mark.parametrize("way", [STEPS[0], LOOSE[1]])
def test_guessing_changes_nothing_but_the_number_of_steps(make_tiny, way):
    loaded = make_tiny("llama")
    with torch.no_grad():
        loaded.module.get_output_embeddings().weight.mul_(30)      # sharp, so that it repeats itself
    asked = some(5, new=60)
    for sampling in (Sampling(max_new_tokens=60), Sampling(max_new_tokens=60, repetition_penalty=1.05, temperature=0.5, stop=("q",))):
        plain = engine_of(loaded, drafts="never", **way)
        guessing = engine_of(loaded, drafts="always", **way)
        with guessing.stream(asked) as stream:
            ids = [stream.submit(r, sampling) for r in asked]
            done = finish(stream)
        expected = plain.generate(asked, sampling)
        if way["compiled"]:
            assert [done[i] for i in ids] == expected
        else:
            near([done[i] for i in ids], expected, room=1e-4)
        assert stream.num_guessed > stream.num_stood > 10


def test_a_guess_is_what_followed_before():
    lookup = Lookup()
    assert lookup.guess([1, 2, 3, 4, 9, 1, 2], 3) == ()
    assert lookup.guess([1, 2, 3, 4, 9, 1, 2, 3], 3) == (4, 9, 1)
    assert lookup.guess([1, 2, 3, 4, 9, 1, 2, 3, 5], 3) == ()
    again = Lookup()
    assert again.guess([7, 7, 7, 7, 7], 4) == (7, 7, 7, 7)
    assert again.guess([7, 7, 7, 7, 7], 0) == ()


def test_guessing_stops_where_it_does_not_pay():
    payoff = Payoff()
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        payoff.saw_step(rows, 0.010 if rows <= 8 else 0.010 * rows / 8)
    assert payoff.length(1) > 0                  # rows beside one sequence cost nothing here
    assert payoff.length(64) == 0                # beside 64 they cost as much as they win
    for _ in range(60):
        payoff.saw_guess(4, 0)
    assert payoff.length(1) == 0
    for _ in range(2000):
        payoff.length(1)
    assert payoff.length(1) > 0                  # tried again later


def test_guesses_that_cannot_keep_the_bits_are_refused(tiny_llama):
    with pytest.raises(EngineError, match=r"drafts: always changes the last bits"):
        engine_of(tiny_llama, compiled=False, drafts="always")
    with pytest.raises(EngineError, match=r"engine\.drafts is one of auto, always, never; found 'x'"):
        engine_of(tiny_llama, drafts="x")
    with pytest.raises(EngineError, match=r"engine\.slots is a whole number from 1 on; found 0"):
        engine_of(tiny_llama, slots=0)


# guides

@pytest.mark.parametrize("way", STEPS)
def test_a_guided_text_is_what_the_guide_asks_for(tiny_llama, way):
    schema = {"type": "integer", "minimum": 10, "maximum": 999}
    for c in engine_of(tiny_llama, **way).generate(some(8), Sampling(guide={"json_schema": schema}, max_new_tokens=40)):
        assert c.stop in ("grammar", "end_token")
        assert 10 <= json.loads(c.text) <= 999
    for c in engine_of(tiny_llama, **way).generate(some(8), Sampling(guide={"regex": r"[ab]{2,3}(=\d)?"}, max_new_tokens=40)):
        assert re.fullmatch(r"[ab]{2,3}(=\d)?", c.text)
        assert all(x <= 0 for x in c.logp_gen)


def test_guided_and_guessed(make_tiny):
    loaded = make_tiny("llama")
    sampling = Sampling(guide={"regex": "(abc|abd)*"}, max_new_tokens=60)
    asked = some(4, new=60)
    expected = engine_of(loaded, drafts="never").generate(asked, sampling)
    if can_compile():
        assert engine_of(loaded, drafts="always").generate(asked, sampling) == expected
    assert all(set(c.text) <= set("abcd") for c in expected)


def test_bfloat16_log_probs_are_near_the_trainers(make_tiny):
    """Rounded where the module rounds, so that only the order of sums differs."""
    loaded = make_tiny("llama")
    policy = state_of(loaded, dtype="bfloat16").policy
    asked = some(6, new=40)
    done = engine_of(loaded).generate(asked, Sampling(max_new_tokens=40))
    from burnish.trainer.columns import score_rows
    from burnish.types import Row

    rows = [Row(r.tokens + c.tokens, (False,) * 20 + (True,) * len(c.tokens), {}) for r, c in zip(asked, done, strict=True)]
    trained = score_rows(policy, rows, sampling=Sampling(), tokens_per_micro_batch=10_000)
    gaps = [abs(a - b) for c, t in zip(done, trained, strict=True) for a, b in zip(c.logp_gen, t[20:], strict=True)]
    assert sum(gaps) / len(gaps) < 4e-3
