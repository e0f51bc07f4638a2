"""The vLLM engine with vLLM itself: T4 and T5 ids and log-probs as sampled, T10 whose is whose, T11 weights, T18 how turns end."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from burnish.config import Sampling
from burnish.config.parts import Guide
from burnish.engines import Request
from burnish.engines.base import EngineError
from burnish.engines.native.sampler import stream_key
from burnish.engines.vllm import server
from burnish.models.logprobs import Adjustment, sampling_logits

pytestmark = pytest.mark.vllm
pytest_plugins = ("closing", "vllm_setup")

FLOAT32_NATS = 1e-4
"""Measured on SmolLM2-135M in float32: worst 5.8e-5 of 384 tokens."""
SAMPLINGS = {
    "plain": Sampling(max_new_tokens=12),
    "cool": Sampling(temperature=0.6, max_new_tokens=12),
    "top_k": Sampling(top_k=5, max_new_tokens=12),
    "top_p": Sampling(top_p=0.8, max_new_tokens=12),
    "min_p": Sampling(min_p=0.3, max_new_tokens=12),
    "top_k_and_top_p": Sampling(temperature=1.3, top_k=20, top_p=0.9, max_new_tokens=12),
    "top_k_and_min_p": Sampling(temperature=1.3, top_k=20, min_p=0.02, max_new_tokens=12),
    "bias": Sampling(logit_bias={"a": 4.0, "b": -3.0}, max_new_tokens=12),
    "banned": Sampling(banned_tokens=tuple("abcdefghijklm"), max_new_tokens=12),
    "penalty": Sampling(repetition_penalty=1.4, max_new_tokens=12),
}
GREEDY = Sampling(temperature=0.0, max_new_tokens=20)
TEXTS = ("12+3=", "the cat sat on", "a", "9*8=", "x y z", "hello, world: 42", "12+3=", "7")


def requests(loaded, *, samples=1, max_new_tokens=12, texts=TEXTS):
    return [
        Request(tuple(loaded.tokenizer(t).input_ids), stream_key(0, f"task {i}", n), max_new_tokens)
        for i, t in enumerate(texts) for n in range(samples)
    ]


@torch.no_grad()
def scored(loaded, request, completion, sampling):
    """The log-probs that transformers gives the completion's tokens, under the distribution that `sampling` describes."""
    from burnish.chat.template import by_ids

    tokens, start = [*request.tokens, *completion.tokens], len(request.tokens)
    logits = loaded.module(torch.tensor([tokens])).logits[0, start - 1 : -1].float()
    adjust = Adjustment.of(by_ids(sampling, loaded.tokenizer))
    if adjust:
        new = range(len(completion.tokens))
        logits = adjust(logits, before_N=[tokens[: start + n] for n in new], num_new_N=list(new))
    z = logits if sampling.temperature == 0 else sampling_logits(logits, **sampling.distribution)
    return z.log_softmax(-1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0].tolist()


def assert_scored(loaded, asked, done, sampling):
    for request, completion in zip(asked, done, strict=True):
        assert completion.tokens and len(completion.tokens) == len(completion.logp_gen)
        assert completion.logp_gen == pytest.approx(scored(loaded, request, completion, sampling), abs=FLOAT32_NATS)


def assert_greedy(loaded, asked, done):
    """The tokens are the most probable ones, but where two are equally so."""
    for request, completion in zip(asked, done, strict=True):
        tokens, start = [*request.tokens, *completion.tokens], len(request.tokens)
        with torch.no_grad():
            logits = loaded.module(torch.tensor([tokens])).logits[0, start - 1 : -1]
        best = logits.max(-1).values
        assert logits.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0].tolist() == pytest.approx(best.tolist(), abs=1e-3)
        assert set(completion.logp_gen) == {0.0}


def state(loaded):
    return loaded.module.state_dict().items()


# T4, T5, T10

@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_log_probs_are_those_of_the_distribution_sampled_from(pair, sampling):
    """Also: no token is drawn that filters, bans or penalties leave out, whose log-prob would be -inf here."""
    engine, loaded = pair
    asked = requests(loaded, samples=3)
    assert_scored(loaded, asked, engine.generate(asked, sampling), sampling)


def test_greedy_takes_the_most_probable_token_and_calls_it_certain(pair):
    engine, loaded = pair
    asked = requests(loaded, max_new_tokens=20)
    done = engine.generate(asked, GREEDY)
    assert_greedy(loaded, asked, done)
    assert len({c.tokens for c in done}) > 3


def test_the_same_requests_give_the_same_tokens_and_other_streams_others(pair):
    engine, loaded = pair
    asked = requests(loaded, samples=4)
    once = engine.generate(asked, SAMPLINGS["plain"])
    assert [c.tokens for c in engine.generate(asked, SAMPLINGS["plain"])] == [c.tokens for c in once]
    assert [c.tokens for c in engine.generate(asked[::-1], SAMPLINGS["plain"])][::-1] == [c.tokens for c in once]
    assert len({c.tokens for c in once[:4]}) == 4
    others = [Request(r.tokens, r.stream + 1, r.max_new_tokens) for r in asked]
    assert [c.tokens for c in engine.generate(others, SAMPLINGS["plain"])] != [c.tokens for c in once]


def test_draws_follow_the_distribution(pair):
    engine, loaded = pair
    sampling, (asked,) = Sampling(max_new_tokens=1, top_k=6), requests(loaded, texts=("12+3=",))
    done = engine.generate([Request(asked.tokens, stream_key(1, "draws", n), 1) for n in range(600)], sampling)
    with torch.no_grad():
        logits = loaded.module(torch.tensor([asked.tokens])).logits[:, -1]
    prob = sampling_logits(logits, **sampling.distribution).softmax(-1)[0]
    count = torch.bincount(torch.tensor([c.tokens[0] for c in done]), minlength=len(prob)).double()
    kept = prob > 0
    assert count[~kept].sum() == 0
    assert float(((count - 600 * prob) ** 2 / (600 * prob))[kept].sum()) < 25       # chi-square, 5 degrees of freedom, p = 0.0001


def test_each_completion_belongs_to_its_request(pair):
    engine, loaded = pair
    asked = [
        Request(r.tokens, r.stream, 1 + i % 7, priority=float(i % 3)) for i, r in enumerate(requests(loaded, samples=6))
    ]
    seen = []
    done = engine.generate(asked, GREEDY, progress=lambda n, of: seen.append((n, of)))
    assert_greedy(loaded, asked, done)
    assert all(len(c.tokens) <= r.max_new_tokens for r, c in zip(asked, done, strict=True))
    assert seen[-1] == (48, 48) and seen == sorted(seen)


# T18

def writes_on(loaded, step=1):
    """Weights with which the model goes on in its alphabet: after each character the one `step` places behind it."""
    state = {name: torch.zeros_like(tensor) if "_proj" in name else tensor.clone() for name, tensor in loaded.module.state_dict().items()}
    vocabulary = len(loaded.tokenizer)
    one_hot = torch.eye(vocabulary, loaded.module.config.hidden_size)
    state["model.embed_tokens.weight"] = one_hot
    state["lm_head.weight"] = 20 * one_hot[[(i - step) % vocabulary for i in range(vocabulary)]]
    return state


@pytest.fixture(scope="module")
def writer(running):
    """The server with a model that writes 123456789abc... after a 0; and its tokenizer."""
    engine, loaded = running("server")
    engine.load(1, writes_on(loaded).items())
    return engine, loaded.tokenizer


def written(writer, sampling, *, prompt="0", max_new_tokens=12):
    engine, tokenizer = writer
    if engine.version != 1:
        pytest.fail("another test has loaded other weights in between")
    return engine.generate([Request(tuple(tokenizer(prompt).input_ids), 1, max_new_tokens)], sampling)[0]


@pytest.mark.parametrize(
    ("stop", "text", "tokens", "reason"),
    [
        (("5",), "1234", 5, "stop_string"),
        (("456",), "123", 6, "stop_string"),
        (("67", "456", "z"), "123", 6, "stop_string"),
        (("1",), "", 1, "stop_string"),
        (("9abc",), "12345678", 12, "stop_string"),
        (("57",), "123456789abc", 12, "max_tokens"),
    ],
)
def test_stop_strings(writer, stop, text, tokens, reason):
    done = written(writer, Sampling(temperature=0.0, stop=stop))
    assert (done.text, len(done.tokens), done.stop) == (text, tokens, reason)
    assert len(done.logp_gen) == tokens


def test_end_tokens_several_of_them_and_nothing_but_one(writer):
    """The tokens that the model's own settings call ends, 5 to 8, are written past; they are the characters 3 to 6."""
    assert written(writer, Sampling(temperature=0.0)).text == "123456789abc"
    done = written(writer, Sampling(temperature=0.0, end_tokens=("x", "7", "9")))
    assert (done.text, done.stop, len(done.tokens)) == ("123456", "end_token", 7)
    done = written(writer, Sampling(temperature=0.0), prompt=";", max_new_tokens=3)      # behind the last character comes <pad>, then <end>
    assert (done.text, done.stop, done.tokens) == ("<pad>", "end_token", (0, 1))
    done = written(writer, Sampling(temperature=0.0, end_tokens=("z",)), prompt=";", max_new_tokens=4)
    assert (done.text, done.stop) == ("<pad><end>01", "max_tokens")


def test_the_context_is_the_limit_and_a_prompt_beyond_it_an_error(pair):
    engine, _ = pair
    context = engine.link.context_tokens
    sampling = Sampling(temperature=0.0, max_new_tokens=50, end_tokens=(";",))
    fits, full, beyond, empty = engine.generate([Request((9,) * n, 1, 50) for n in (context - 6, context - 1, context, 0)], sampling)
    assert (fits.stop, len(fits.tokens)) == ("context", 6)
    assert (full.stop, len(full.tokens)) == ("context", 1)
    assert (beyond.stop, beyond.tokens) == ("error:prompt_too_long", ())
    assert empty.stop == "error:empty_prompt"


def test_a_request_that_vllm_refuses_is_an_error_of_its_own(pair):
    engine, loaded = pair
    asked = [Request((5, 100_000), 1, 4), *requests(loaded, max_new_tokens=4)]
    bad, *good = engine.generate(asked, GREEDY)
    assert bad.stop.startswith("error:") and bad.tokens == ()
    assert_greedy(loaded, asked[1:], good)


# streams

def test_requests_come_and_go_while_others_run(pair):
    engine, loaded = pair
    first, second = requests(loaded, max_new_tokens=400, texts=("abc", "12+3="))
    stream = engine.stream()
    sampling = Sampling(max_new_tokens=400, end_tokens=(";",), banned_tokens=(";",))
    gone, stays = stream.submit(first, sampling), stream.submit(second, sampling)
    stream.cancel(gone)
    late = stream.submit(Request(second.tokens, 5, 3), sampling)
    ended = {}
    while len(ended) < 2:
        ended |= dict(stream.advance())
    assert ended.keys() == {late, stays} and len(ended[stays].tokens) == 400
    assert_scored(loaded, [Request(second.tokens, 5, 3), second], [ended[late], ended[stays]], sampling)
    assert stream.advance() == []
    stream.cancel(gone)


# T11

def test_new_weights_are_sampled_from_at_once_and_no_prefix_is_remembered(pair, make_sharp):
    """Prompts are longer than a block of vLLM's cache, so that a remembered prefix would show."""
    engine, old = pair
    new = make_sharp("llama_tied" if old.module.config.tie_word_embeddings else "llama", seed=1)
    long = [Request(tuple(5 + (i * k) % 50 for i in range(300)), k, 20) for k in (1, 2, 3)]
    sampling = Sampling(max_new_tokens=20, end_tokens=(";",))
    for version, loaded in ((0, old), (7, new), (8, old)):
        if version:
            engine.load(version, state(loaded))
        for _ in range(2):
            done = engine.generate(long, sampling)
            assert {c.version for c in done} == {version}
            assert_scored(loaded, long, done, sampling)
        assert_greedy(loaded, long, engine.generate(long, GREEDY))
    assert engine.version == 8


def test_load_waits_for_the_requests_that_run(pair, make_sharp):
    engine, old = pair
    new = make_sharp("llama_tied" if old.module.config.tie_word_embeddings else "llama", seed=2)
    asked = requests(old, max_new_tokens=60, texts=("12+3=", "abc"))
    stream = engine.stream()
    sampling = Sampling(max_new_tokens=60, end_tokens=(";",))
    ids = [stream.submit(r, sampling) for r in asked]
    engine.load(9, state(new))
    ended = dict(stream.advance())
    assert {c.version for c in ended.values()} == {0}
    assert_scored(old, asked, [ended[i] for i in ids], sampling)
    later = dict(stream.advance() if (id_ := stream.submit(asked[0], sampling)) is None else _until(stream, id_))
    assert later[id_].version == 9
    assert_scored(new, [asked[0]], [later[id_]], sampling)


def _until(stream, id_):
    ended = []
    while id_ not in dict(ended):
        ended += stream.advance()
    return ended


def test_weights_that_do_not_fit_leave_the_old_ones(pair):
    engine, loaded = pair
    asked, whole = requests(loaded), dict(state(loaded))
    wrong = {
        "not among": {n: t for n, t in whole.items() if "layers.1.mlp.down" not in n},
        "no tensor": whole | {"model.layers.2.mlp.down_proj.weight": torch.zeros(128, 128)},
        "has the shape": whole | {"model.norm.weight": torch.zeros(64)},
    }
    for what, tensors in wrong.items():
        with pytest.raises(EngineError, match=what):
            engine.load(3, tensors.items())
        assert engine.version == 0
    assert_scored(loaded, asked, engine.generate(asked, SAMPLINGS["plain"]), SAMPLINGS["plain"])
    with pytest.raises(EngineError, match="give load the trainer's"):
        engine.load(3)


def test_weights_damaged_on_their_way_leave_the_old_ones(running, monkeypatch):
    engine, loaded = running("server")
    engine.load(0, state(loaded))
    write = server.wire.write

    def damaged(folder, version, weights):
        write(folder, version, weights)
        file = folder / server.wire.WEIGHTS
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)

    monkeypatch.setattr(server.wire, "write", damaged)
    asked = requests(loaded)
    with pytest.raises(EngineError, match="checksums of 1 of"):
        engine.load(4, ((n, t + 1) for n, t in state(loaded)))
    assert engine.version == 0
    assert_scored(loaded, asked, engine.generate(asked, SAMPLINGS["plain"]), SAMPLINGS["plain"])


def test_a_load_that_breaks_off_inside_of_vllm_ends_sampling_until_one_succeeds(running, monkeypatch):
    engine, loaded = running("local")
    runner = engine.link.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def breaks(**_):
        raise RuntimeError("half way")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "reload_weights", breaks)
        with pytest.raises(EngineError, match="half way"):
            engine.load(5, state(loaded))
    with pytest.raises(EngineError, match="load again"):
        engine.generate(requests(loaded), GREEDY)
    engine.load(0, state(loaded))
    assert_greedy(loaded, requests(loaded), engine.generate(requests(loaded), GREEDY))


def test_weights_that_someone_else_loaded_are_noticed(running):
    engine, loaded = running("server")
    engine.load(0, state(loaded))
    engine.version = 6
    with pytest.raises(EngineError, match=r"of version \[0\], not 6"):
        engine.generate(requests(loaded), GREEDY)
    engine.version = 0


def test_logits_that_are_not_finite_end_their_sequence_as_an_error(pair):
    engine, loaded = pair
    broken = {n: t.clone() for n, t in state(loaded)}
    broken["model.norm.weight"].fill_(float("nan"))
    engine.load(2, broken.items())
    done = engine.generate(requests(loaded), SAMPLINGS["plain"])
    assert all(c.stop.startswith("error:") and c.tokens == () for c in done)
    engine.load(0, state(loaded))
    assert_greedy(loaded, requests(loaded), engine.generate(requests(loaded), GREEDY))


# what is refused

@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        (Sampling(top_p=0.9, min_p=0.1), "min_p before top_p"),
        (Sampling(temperature=0.001), "raises sampling.temperature"),
        (Sampling(logit_bias={"a": 1.0}, repetition_penalty=1.1), "logit_bias before repetition_penalty"),
        (Sampling(logit_bias={"a": 101.0}), "at most 100"),
        (Sampling(min_new_tokens=2), "min_new_tokens"),
        (Sampling(guide=Guide(regex="a+")), "guide"),
    ],
)
def test_settings_that_vllm_would_not_honour_are_refused(pair, sampling, why):
    with pytest.raises(EngineError, match=why):
        pair[0].generate(requests(pair[1]), sampling)


def test_the_trainers_random_numbers_and_threads_stay_as_they_are(running):
    engine, loaded = running("local")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    engine.generate(requests(loaded), SAMPLINGS["plain"])
    assert torch.equal(torch.get_rng_state(), before)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


# the server's process

def test_a_server_that_dies_ends_the_call_with_the_end_of_its_log(start_server, open_):
    lines = []
    engine = open_(start_server(tell=lines.append))
    assert lines and all("starting" in line for line in lines)
    process = engine.link.process
    stream = engine.stream()
    sampling = Sampling(max_new_tokens=400, end_tokens=(";",), banned_tokens=(";",))
    for n in range(16):
        stream.submit(Request((5, 6, 7), n, 400), sampling)
    os.killpg(process.popen.pid, signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(EngineError, match=r"is gone: (?s:.*)the end of its log:\n.*INFO"):
        while True:
            stream.advance()
    with pytest.raises(EngineError, match="is gone"):
        engine.load(1, {}.items())
    assert time.monotonic() - start_s < 20
    engine.close()
    engine.close()
    assert not process.folder.exists()


def test_a_server_that_does_not_start_says_why_and_one_that_takes_too_long_is_ended(start_server):
    with pytest.raises(EngineError, match=r"did not start; its process ended with 2; (?s:.*)unrecognized arguments: --no-such-option"):
        start_server(options={"no_such_option": 3})
    with pytest.raises(EngineError, match="did not answer within 1 s"):
        start_server(start_timeout_s=1.0)
    with pytest.raises(EngineError, match="logprobs_mode"):
        start_server(options={"logprobs_mode": "raw_logits"})


def test_no_requests_no_completions(pair):
    assert pair[0].generate([], SAMPLINGS["plain"]) == []
