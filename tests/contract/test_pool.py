"""Several engines as one: who gets what, and what happens when one fails, hangs or lacks the weights."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from parts import engine_of
from standin import FAST, PLAIN, Model, Reply, StandIn, ask, echo

from burnish.engines import Completion, Request
from burnish.engines.base import EngineError
from burnish.engines.pool import EnginePool
from burnish.engines.remote import RemoteEngine
from burnish.engines.scripted import ScriptedEngine

pytest.importorskip("httpx2")
pytest_plugins = ("closing",)

HALF = Reply({"fine": "x" * 100}, cut=20)


class Part(ScriptedEngine):
    """A member of a pool that can be told to fail, to hang, to refuse weights, and to answer with errors of its server."""

    def __init__(self, tokenizer, name, **values):
        super().__init__(lambda prompt, _: prompt[::-1], tokenizer, **values)
        self.seen = []
        self.name, self.raises, self.hangs, self.fails, self.refuses, self.lacks, self.weights = name, None, None, set(), None, 0, None
        self.closed = 0

    def generate(self, requests, sampling, *, progress=None):
        self.seen += requests
        done = super().generate(requests, sampling, progress=progress)
        if self.hangs:
            self.hangs.wait(5)
        if self.raises:
            raise self.raises
        prompts = [self.tokenizer.decode(r.tokens) for r in requests]
        done = [Completion((), (), "", f"error:server: {self.name}", self.version) if {p, "*"} & self.fails else c
                for p, c in zip(prompts, done, strict=True)]
        return done[: len(done) - self.lacks]

    def load(self, version, weights=None):
        if self.refuses:
            raise self.refuses
        self.weights = None if weights is None else dict(weights)
        super().load(version)

    def close(self):
        self.closed += 1

    def prompts(self):
        return [self.tokenizer.decode(r.tokens) for r in self.seen]


@pytest.fixture
def parts(tokenizer):
    return [Part(tokenizer, name) for name in "abc"]


TEXTS = [f"{i}+{i}=" for i in range(30)]
BACK = [t[::-1] for t in TEXTS]


def run(pool, tokenizer, texts=TEXTS, **values):
    return [c.text if not c.stop.startswith("error") else c.stop for c in pool.generate(ask(tokenizer, *texts, **values), PLAIN)]


def test_requests_go_where_least_waits(parts, tokenizer):
    pool = EnginePool(parts)
    assert run(pool, tokenizer) == BACK
    assert [len(p.seen) for p in parts] == [10, 10, 10]
    assert sorted(t for p in parts for t in p.prompts()) == sorted(TEXTS)
    long = ask(tokenizer, "1" * 30, most=500) + ask(tokenizer, *TEXTS[:10])
    before = [len(p.seen) for p in parts]
    pool.generate(long, PLAIN)
    assert sorted(len(p.seen) - n for p, n in zip(parts, before, strict=True)) == [1, 5, 5]


def test_a_conversation_stays_with_its_engine(parts, tokenizer):
    pool = EnginePool(parts)

    def turn(*sessions):
        """Which engine answered each conversation."""
        for p in parts:
            p.seen.clear()
        pool.generate([Request(tuple(tokenizer(s).input_ids), 0, 9, session=s) for s in sessions], PLAIN)
        return {r: i for i, p in enumerate(parts) if p.raises is None for r in p.prompts()}

    names = [f"s{i}" for i in range(9)]
    home = turn(*names)
    assert sorted(home.values()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for some in ((names[8], names[3], names[1]), (names[4],), names):
        assert turn("new", *some).items() >= {s: home[s] for s in some}.items()
    parts[1].raises = EngineError("gone")
    mine = [s for s in names if home[s] == 1]
    moved = turn(*mine)
    assert set(moved) == set(mine) and 1 not in moved.values()
    parts[1].raises = pool.members[1].why = None
    assert turn(*mine) == moved              # their history is there now


def test_requests_without_a_conversation_fill_up_around_those_with_one(parts, tokenizer):
    pool = EnginePool(parts)
    talk = Request(tuple(tokenizer("talk" * 8).input_ids), 0, 40, session="s")
    pool.generate([talk], PLAIN)
    (home,) = [p for p in parts if p.seen]
    home.seen.clear()
    pool.generate([*ask(tokenizer, *TEXTS[:8]), talk], PLAIN)
    assert len(home.seen) < 3


@pytest.mark.parametrize("fault", ["raises", "lacks", "server"])
def test_an_engine_that_fails_is_taken_out_and_nothing_is_lost_or_doubled(parts, tokenizer, fault):
    bad = parts[1]
    if fault == "raises":
        bad.raises = RuntimeError("out of memory")
    elif fault == "lacks":
        bad.lacks = 1
    else:
        bad.fails = {"*"}
    pool = EnginePool(parts)
    assert run(pool, tokenizer) == BACK
    why = {"raises": "RuntimeError: out of memory", "lacks": "gave 9 completions for 10", "server": "error:server: b"}[fault]
    assert list(pool.out) == ["1 (Part)"] and why in pool.out["1 (Part)"]
    assert len(parts[0].seen) + len(parts[2].seen) == 30
    seen = len(bad.seen)
    assert run(pool, tokenizer) == BACK
    assert len(bad.seen) == seen


def test_an_engine_comes_back_after_a_while(parts, tokenizer):
    bad = parts[1]
    bad.raises = RuntimeError("gone")
    pool = EnginePool(parts, retry_after_s=100.0)
    run(pool, tokenizer)
    pool.members[1].out_since -= 101
    seen = len(bad.seen)
    assert run(pool, tokenizer) == BACK and len(bad.seen) == seen + 10 and pool.out          # tried again, and still gone
    bad.raises = None
    pool.members[1].out_since -= 90
    assert run(pool, tokenizer) == BACK and len(bad.seen) == seen + 10                      # not yet
    pool.members[1].out_since -= 90
    assert run(pool, tokenizer) == BACK and len(bad.seen) == seen + 20 and not pool.out


def test_where_all_are_out_all_are_tried_and_all_causes_told(parts, tokenizer):
    for p in parts:
        p.raises = RuntimeError(f"cause {p.name}")
    pool = EnginePool(parts)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"cause a.*cause b.*cause c"):
            run(pool, tokenizer)
    parts[2].raises = None
    assert run(pool, tokenizer) == BACK
    assert list(pool.out) == ["0 (Part)", "1 (Part)"]


def test_servers_that_all_fail_everything_are_told_as_an_error_too(parts, tokenizer):
    for p in parts:
        p.fails = {"*"}
    with pytest.raises(EngineError, match=r"error:server: a.*error:server: b.*error:server: c"):
        run(EnginePool(parts), tokenizer)


def test_one_request_that_fails_is_tried_on_each_engine_and_takes_none_out(parts, tokenizer):
    for p in parts:
        p.fails = {TEXTS[4]}
    pool = EnginePool(parts)
    got = run(pool, tokenizer)
    assert got[4].startswith("error:server") and got[:4] + got[5:] == BACK[:4] + BACK[5:]
    assert [p.prompts().count(TEXTS[4]) for p in parts] == [1, 1, 1]
    parts[2].fails = set()
    assert run(EnginePool(parts), tokenizer) == BACK


def test_a_hanging_engine_is_left_and_what_it_says_late_is_thrown_away(parts, tokenizer):
    parts[0].hangs = threading.Event()
    pool = EnginePool(parts, timeout_s=0.3, retry_after_s=0.0)
    assert run(pool, tokenizer) == BACK
    assert "no answer within 0.3 s" in pool.out["0 (Part)"]
    seen = len(parts[0].seen)
    assert run(pool, tokenizer) == BACK and len(parts[0].seen) == seen       # busy still: not called a second time
    pool.load(1)
    assert parts[0].version == 0 and "has not ended" in pool.out["0 (Part)"]
    parts[0].hangs.set()
    while pool.members[0].busy:
        time.sleep(0.005)
    assert {c.version for c in pool.generate(ask(tokenizer, *TEXTS), PLAIN)} == {1} and len(parts[0].seen) == seen
    pool.load(2)
    assert run(pool, tokenizer) == BACK and len(parts[0].seen) == seen + 10 and not pool.out


def test_weights_are_gathered_once_and_given_to_all(parts):
    gathered = []

    def weights():
        for name in ("w", "v"):
            gathered.append(name)
            yield name, torch.full((2,), float(len(gathered)))

    pool = EnginePool(parts)
    pool.load(3, weights())
    assert gathered == ["w", "v"] and pool.version == 3
    assert all(p.version == 3 and {n: t.tolist() for n, t in p.weights.items()} == {"w": [1.0, 1.0], "v": [2.0, 2.0]} for p in parts)


def test_an_engine_without_the_last_weights_is_out_until_it_has_later_ones(parts, tokenizer):
    pool = EnginePool(parts, retry_after_s=0.0)
    parts[1].refuses = RuntimeError("disk full")
    pool.load(1, [("w", torch.ones(1))])
    assert "load of version 1: RuntimeError: disk full" in pool.out["1 (Part)"]
    parts[1].version = 1                       # whatever it says of itself
    assert run(pool, tokenizer) == BACK and not parts[1].seen
    for p in (parts[0], parts[2]):
        p.raises = RuntimeError("gone")
    with pytest.raises(EngineError, match="disk full"):
        run(pool, tokenizer)
    assert not parts[1].seen
    parts[1].refuses = None
    pool.load(2, [("w", torch.ones(1))])
    assert not pool.out and run(pool, tokenizer) == BACK and len(parts[1].seen) > 0
    for p in parts:
        p.refuses = RuntimeError("full")
    with pytest.raises(EngineError, match="took version 3"):
        pool.load(3)
    with pytest.raises(EngineError, match="version 3"):
        run(pool, tokenizer)


def test_an_engine_that_takes_weights_without_a_word_and_keeps_the_old_ones_is_out(parts, tokenizer):
    parts[1].load = lambda *_: None
    pool = EnginePool(parts)
    pool.load(1)
    assert "its weights are of version 0" in pool.out["1 (Part)"]
    assert run(pool, tokenizer) == BACK and not parts[1].seen


def test_an_engine_whose_weights_are_of_another_version_is_not_asked(parts, tokenizer):
    pool = EnginePool(parts)
    parts[2].version = 9
    assert run(pool, tokenizer) == BACK and not parts[2].seen
    with pytest.raises(EngineError, match=r"versions \[0, 9\]"):
        EnginePool(parts)


def test_an_engine_that_shares_the_trainers_weights_is_given_none(tiny_llama, tokenizer):
    native, other = engine_of(tiny_llama), Part(tokenizer, "a")
    pool = EnginePool([native, other])
    pool.load(2, [("w", torch.ones(1))])
    assert native.version == other.version == 2 and other.weights.keys() == {"w"}
    assert not pool.abilities.shares_weights and not pool.abilities.logprobs and pool.abilities.sampling == other.abilities.sampling


def test_a_pools_abilities_are_what_all_can(tokenizer, open_):
    def remote_engine(**values):
        return open_(RemoteEngine("http://127.0.0.1:9", model="m", tokenizer=tokenizer, **values))

    full = ScriptedEngine([], tokenizer, logprobs=True)
    both = EnginePool([full, remote_engine(knows=("top_k",))]).abilities
    assert (both.logprobs, both.token_ids, both.publish, both.streams, both.live) == (False, False, False, False, False)
    assert both.sampling == full.abilities.sampling & remote_engine(knows=("top_k",)).abilities.sampling
    assert EnginePool([full, ScriptedEngine([], tokenizer, logprobs=True)]).abilities.logprobs


def test_pools_that_cannot_be(parts):
    for engines, told in (([], "at least one"), ([parts[0], parts[0]], "twice")):
        with pytest.raises(EngineError, match=told):
            EnginePool(engines)


def test_closing_a_pool_closes_all_whatever_one_says(parts):
    def refuses():
        raise RuntimeError("no")

    parts[0].close = refuses
    with pytest.raises(RuntimeError):
        EnginePool(parts).close()
    assert [p.closed for p in parts[1:]] == [1, 1]


def test_a_pool_of_servers_of_which_one_dies(tokenizer, open_):
    model = Model(tokenizer, echo(tokenizer))
    servers = [open_(StandIn(model.openai)) for _ in range(2)]
    engines = [open_(RemoteEngine(s.url + "/v1", model="m", tokenizer=tokenizer, **FAST, tries=1)) for s in servers]
    pool = EnginePool(engines)
    assert run(pool, tokenizer) == BACK and all(len(s.calls) == 15 for s in servers)
    answered = []

    def dying(path, body):
        answered.append(body)
        return model.openai(path, body) if len(answered) <= 5 else HALF

    servers[0].answer = dying
    assert run(pool, tokenizer) == BACK and not pool.out          # it answered some: the rest went to the other
    assert run(pool, tokenizer) == BACK and "RemoteProtocolError" in pool.out["0 (RemoteEngine)"]
