"""A week of serving in small: 20,000 requests, conversations, cancels, bad input, new weights under way."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest
import torch
from parts import can_compile, engine_of

from burnish.config import Sampling
from burnish.engines import Request

pytestmark = pytest.mark.slow
WAYS = [
    pytest.param({"compiled": True}, 20_000, id="compiled", marks=pytest.mark.skipif(not can_compile(), reason="no compiled step here")),
    pytest.param({"compiled": False, "batch_invariant": False}, 1_500, id="torch"),
]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(("way", "total"), WAYS)
@pytest.mark.parametrize("new_weights", ["continue", "read_again"])
def test_nothing_is_lost_nothing_is_stale_and_memory_is_flat(make_tiny, way, total, new_weights):
    loaded, rng = make_tiny("llama"), random.Random(0)
    engine = engine_of(loaded, slots=32, cache_tokens=2048, new_weights=new_weights, **way)
    kinds = [Sampling(max_new_tokens=16), Sampling(max_new_tokens=16, top_p=0.9), Sampling(max_new_tokens=16, temperature=0.0)]
    weights = {0: [p.detach().clone() for p in loaded.module.parameters()]}
    system = tuple(rng.randrange(5, 70) for _ in range(40))
    asked, open_, done, cancelled, talks = {}, set(), {}, set(), []
    memory, every = [], total // 8

    def submit(stream):
        if talks and rng.random() < 0.4:
            prompt = (*talks.pop(rng.randrange(len(talks))), 9, 8)      # a conversation goes on
        else:
            prompt = (*system[: rng.choice((0, 20, 40))], *(rng.randrange(5, 70) for _ in range(rng.randrange(1, 30))))
        if rng.random() < 0.01:
            prompt = ()
        request = Request(prompt, len(asked), rng.randrange(1, 17), priority=rng.randrange(2))
        kind = rng.choice(kinds)
        asked[id_ := stream.submit(request, kind)] = request, kind
        open_.add(id_)

    with engine.stream() as stream:
        while len(asked) < total or open_:
            for _ in range(rng.randrange(6)):
                if len(asked) < total:
                    submit(stream)
            if rng.random() < 0.2 and open_:
                gone = rng.choice(tuple(open_))
                if stream.cancel(gone) is not None:
                    cancelled.add(gone)
                    open_.discard(gone)
            if rng.random() < 60 / total and engine.version < 40:
                with torch.no_grad():
                    for p in loaded.module.parameters():
                        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(engine.version)) * 0.02)
                weights[engine.version + 1] = [p.detach().clone() for p in loaded.module.parameters()]
                engine.load(engine.version + 1)
            for id_, completion in stream.advance():
                assert id_ not in done
                done[id_] = completion
                open_.discard(id_)
                request, _ = asked[id_]
                if not completion.stop.startswith("error") and len(request.tokens) < 150:
                    talks.append((*request.tokens, *completion.tokens))
            if len(done) // every > len(memory):
                memory.append(resident())
                talks = talks[-200:]

    assert done.keys() | cancelled == asked.keys()
    assert not done.keys() & cancelled
    assert len(cancelled) > total / 100
    assert len(weights) > 5
    assert memory[-1] - memory[len(memory) // 2] < 24 * 2**20
    pages = engine.scheduler.pages
    assert not any(pages.holders)
    assert len(pages.free) + len(pages.idle) == pages.num_pages
    assert {c.stop for i, c in done.items() if not asked[i][0].tokens} == {"error:empty_prompt"}

    whole = [i for i, c in done.items() if c.tokens and not c.versions]
    assert len(whole) > total / 2
    for id_ in rng.sample(whole, 150):
        request, kind = asked[id_]
        completion = done[id_]
        with torch.no_grad():
            for p, kept in zip(loaded.module.parameters(), weights[completion.version], strict=True):
                p.copy_(kept)
        fresh = engine_of(loaded, slots=1, **way).generate([request], kind)[0]
        assert fresh.tokens == completion.tokens
        assert fresh.logp_gen == pytest.approx(completion.logp_gen, abs=0 if way["compiled"] else 1e-5)


KINDS = [
    Sampling(max_new_tokens=20), Sampling(max_new_tokens=20, top_p=0.8, temperature=0.6),
    Sampling(max_new_tokens=20, temperature=0.0, repetition_penalty=1.3),
    Sampling(max_new_tokens=20, min_new_tokens=5, stop=("a", "bc"), banned_tokens=("1", "2")),
    Sampling(max_new_tokens=20, guide={"regex": "[ab1]*"}),
]


@pytest.mark.skipif(not can_compile(), reason="no compiled step here")
@pytest.mark.parametrize("seed", range(150))
def test_random_streams_in_little_room_are_as_each_request_alone(make_tiny, seed):
    """A few prompts and samplings at once, few slots, few pages, guesses or none, some cancelled: nothing hangs, every bit is the same."""
    loaded, rng = make_tiny("llama"), random.Random(seed)
    engine = engine_of(
        loaded, slots=rng.randint(1, 5), cache_tokens=16 * rng.randint(4, 14), rows_per_step=rng.choice((1, 3, 16, 64)),
        drafts=rng.choice(("always", "never", "auto")),
    )
    prompts = [tuple(rng.randrange(5, 70) for _ in range(rng.randint(1, 40))) for _ in range(3)]
    asked, done, gone, steps = {}, {}, set(), 0
    with engine.stream() as stream:
        while len(asked) < 14 or stream.live or stream.ready:
            if len(asked) < 14 and rng.random() < 0.6:
                prompt = rng.choice(prompts)
                prompt = prompt[: rng.randint(1, len(prompt))] if rng.random() < 0.3 else prompt
                request = Request(prompt, len(asked), rng.randint(1, 20), priority=rng.randrange(2))
                kind = rng.choice(KINDS)
                asked[stream.submit(request, kind)] = request, kind
            if stream.live and rng.random() < 0.05:
                victim = rng.choice(list(stream.live))
                stream.cancel(victim)
                gone.add(victim)
            done |= dict(stream.advance())
            steps += 1
            assert steps < 5000
    assert done.keys() | gone == asked.keys()
    assert engine.scheduler.pages.promised == 0
    alone = engine_of(loaded, slots=1, drafts="never")
    for id_, completion in done.items():
        if completion.stop != "error:no_room_in_cache":
            assert completion == alone.generate([asked[id_][0]], asked[id_][1])[0]
