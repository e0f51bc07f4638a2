"""What every engine must do: T4 alone or in a batch, T5 ids and log-probs as sampled, T10 whose completion is whose, T18 how turns end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parts import can_compile, engine_of, state_of

from burnish.chat.template import by_ids
from burnish.config import Sampling
from burnish.engines import Request
from burnish.engines.native.sampler import draw, stream_key, uniforms
from burnish.models.load import Loaded
from burnish.models.logprobs import sampling_logits
from burnish.trainer.columns import score_rows
from burnish.types import Row

compiled = pytest.mark.skipif(not can_compile(), reason="no compiled step on this machine")
WAYS = [
    *(pytest.param(name, {"compiled": True}, id=f"{name}-compiled", marks=compiled) for name in ("llama", "llama_tied", "qwen3")),
    *(
        pytest.param(name, {"compiled": False}, id=name)
        for name in ("llama", "llama_tied", "qwen3", "gemma3", "mixtral", "qwen3_moe", "gpt2")
    ),
]
"""Architectures, each by the torch step and, where it can, by the compiled one."""
STEPS = [pytest.param({"compiled": True}, id="compiled", marks=compiled), pytest.param({"compiled": False}, id="torch")]
SAMPLINGS = {
    "plain": Sampling(max_new_tokens=12),
    "cool": Sampling(temperature=0.6, max_new_tokens=12),
    "top_k": Sampling(top_k=5, max_new_tokens=12),
    "top_p": Sampling(top_p=0.8, max_new_tokens=12),
    "min_p": Sampling(min_p=0.6, max_new_tokens=12),
    "all": Sampling(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, max_new_tokens=12),
    "bias": Sampling(logit_bias={"a": 3.0, 7: -2.0}, banned_tokens=("1", 9), max_new_tokens=12),
    "repetition": Sampling(temperature=0.7, repetition_penalty=1.5, max_new_tokens=12),
    "minimum": Sampling(min_new_tokens=6, end_tokens=("<end>", "a", "b"), top_k=9, max_new_tokens=12),
}


def prompts(tokenizer, texts=("12+3=", "the cat sat on", "a", "9*8=", "x y z", "hello, world: 42", "12+3=", "7")):
    return [tuple(tokenizer(t).input_ids) for t in texts]


def requests(loaded: Loaded, *, max_new_tokens: int = 12, samples: int = 1) -> list[Request]:
    return [
        Request(p, stream_key(0, f"task {i}", n), max_new_tokens) for i, p in enumerate(prompts(loaded.tokenizer)) for n in range(samples)
    ]


def sharpened(make_tiny, name):
    """A tiny model with larger logits than random weights give, so that filters and temperatures matter."""
    loaded = make_tiny(name)
    with torch.no_grad():
        loaded.module.get_output_embeddings().weight.mul_(8)
    return loaded


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_log_probs_are_those_of_the_trainer(make_tiny, name, way, sampling):
    loaded = sharpened(make_tiny, name)
    asked = requests(loaded)
    done = engine_of(loaded, **way).generate(asked, sampling)
    rows = [
        Row(r.tokens + c.tokens, (False,) * len(r.tokens) + (True,) * len(c.tokens), {"logp_gen": (0.0,) * len(r.tokens) + c.logp_gen})
        for r, c in zip(asked, done, strict=True)
    ]
    trainer = score_rows(state_of(loaded).policy, rows, sampling=by_ids(sampling, loaded.tokenizer), tokens_per_micro_batch=10_000)
    for row, logp in zip(rows, trainer, strict=True):
        assert logp == pytest.approx(row.columns["logp_gen"], abs=3e-5)
    assert all(x <= 0 for row in rows for x in row.columns["logp_gen"])


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_sequence_does_not_depend_on_its_neighbours(make_tiny, name, way):
    """Bit for bit; with experts up to the last bits of the log-probs, since an expert's matrix product has as many rows as chose it."""
    loaded = make_tiny(name)
    asked = requests(loaded, samples=3)
    whole = engine_of(loaded, **way).generate(asked, SAMPLINGS["plain"])
    alone = engine_of(loaded, slots=1, **way)
    for other in (
        [alone.generate([r], SAMPLINGS["plain"])[0] for r in asked],
        engine_of(loaded, slots=5, rows_per_step=3, **way).generate(asked, SAMPLINGS["plain"]),
        engine_of(loaded, cache_tokens=64, **way).generate(asked[::-1], SAMPLINGS["plain"])[::-1],
    ):
        if name in ("mixtral", "qwen3_moe"):
            assert [c.tokens for c in other] == [c.tokens for c in whole]
            for a, b in zip(other, whole, strict=True):
                assert a.logp_gen == pytest.approx(b.logp_gen, abs=1e-5)
        else:
            assert other == whole


@pytest.mark.parametrize("way", STEPS)
def test_bfloat16_too_gives_the_same_sequences_in_any_batch(make_tiny, way):
    loaded = make_tiny("llama")
    state_of(loaded, dtype="bfloat16")
    asked = requests(loaded, samples=4, max_new_tokens=40)
    sampling = Sampling(max_new_tokens=40)
    whole = engine_of(loaded, **way).generate(asked, sampling)
    alone = engine_of(loaded, **way)
    assert [alone.generate([r], sampling)[0] for r in asked] == whole
    assert engine_of(loaded, slots=7, **way).generate(asked, sampling) == whole


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_greedy_is_what_transformers_generates(make_tiny, name, way):
    loaded = sharpened(make_tiny, name)
    for request, mine in zip(requests(loaded, max_new_tokens=20), engine_of(loaded, **way).generate(
        requests(loaded, max_new_tokens=20), Sampling(temperature=0.0, max_new_tokens=20)), strict=True):
        ids = torch.tensor([request.tokens])
        theirs = loaded.module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0,
            eos_token_id=loaded.tokenizer.eos_token_id,
        )[0, len(request.tokens) :]
        assert list(mine.tokens) == theirs.tolist()
        assert set(mine.logp_gen) == {0.0}


@pytest.mark.parametrize("way", STEPS)
def test_a_prompt_is_read_once_for_all_its_samples(tiny_llama, way):
    engine = engine_of(tiny_llama, **way)
    asked = requests(tiny_llama, samples=4)
    with engine.stream(asked) as stream:
        for request in asked:
            stream.submit(request, SAMPLINGS["plain"])
        while stream.live:
            stream.advance()
    assert stream.num_prompt_rows == sum(len(p) for p in set(prompts(tiny_llama.tokenizer)) if len(p) > 1)   # one token is a newest one


def test_each_completion_belongs_to_its_request(tiny_llama):
    """Greedy completions identify their prompt, whatever slots they passed through and in whatever order they ended."""
    engine = engine_of(tiny_llama, slots=3)
    asked = [Request(r.tokens, r.stream, 1 + i % 7) for i, r in enumerate(requests(tiny_llama, samples=3))]
    greedy = Sampling(temperature=0.0, max_new_tokens=12)
    done = engine.generate(asked, greedy)
    for request, completion in zip(asked, done, strict=True):
        assert completion == engine.generate([request], greedy)[0]
        assert len(completion.tokens) <= request.max_new_tokens


class Forced:
    """A policy whose next token is always the next of a given text, so that stops can be tested to the letter."""

    def __init__(self, loaded, text, end=None):
        self.loaded, self.script = loaded, [*loaded.tokenizer(text).input_ids, *([end] if end is not None else [])]

    def generate(self, sampling, monkeypatch, *, prompt="1", max_new_tokens=None):
        ids = tuple(self.loaded.tokenizer(prompt).input_ids)
        engine = engine_of(self.loaded, drafts="never")
        state = {"n": 0}

        def forced(logits, uniform, sampling):
            token = self.script[min(state["n"], len(self.script) - 1)]
            state["n"] += 1
            return [token] * len(logits), [-0.5] * len(logits)

        monkeypatch.setattr(engine.runner, "draw", forced)
        return engine.generate([Request(ids, 1, max_new_tokens or sampling.max_new_tokens)], sampling)[0]


@pytest.mark.parametrize(
    ("written", "stop", "text", "tokens", "reason"),
    [
        ("7\nmore", ("\n",), "7", 2, "stop_string"),
        ("abcabd.", ("abd",), "abc", 6, "stop_string"),
        ("aab", ("b", "ab"), "a", 3, "stop_string"),
        ("no stop here", ("\n",), "no stop here"[:10], 10, "max_tokens"),
        ("\n", ("\n",), "", 1, "stop_string"),
    ],
)
def test_stop_strings(tiny_llama, monkeypatch, written, stop, text, tokens, reason):
    done = Forced(tiny_llama, written).generate(Sampling(stop=stop, max_new_tokens=10), monkeypatch)
    assert (done.text, len(done.tokens), done.stop) == (text, tokens, reason)
    assert len(done.logp_gen) == tokens


def test_end_tokens_several_of_them_and_nothing_but_one(tiny_llama, monkeypatch):
    vocabulary = tiny_llama.tokenizer.get_vocab()
    both = Sampling(end_tokens=("<end>", ";"), max_new_tokens=10)
    for name in ("<end>", ";"):
        done = Forced(tiny_llama, "ab", end=vocabulary[name]).generate(both, monkeypatch)
        assert (done.text, done.stop, done.tokens[-1]) == ("ab", "end_token", vocabulary[name])
    only = Sampling(end_tokens=(";",), max_new_tokens=3)
    assert Forced(tiny_llama, "ab", end=vocabulary["<end>"]).generate(only, monkeypatch).stop == "max_tokens"
    empty = Forced(tiny_llama, "", end=vocabulary["<end>"]).generate(both, monkeypatch)
    assert (empty.text, empty.tokens, empty.stop) == ("", (vocabulary["<end>"],), "end_token")


def test_without_end_tokens_given_the_tokenizers_own_ends_a_turn(tiny_llama, monkeypatch):
    done = Forced(tiny_llama, "a", end=tiny_llama.tokenizer.eos_token_id).generate(Sampling(max_new_tokens=9), monkeypatch)
    assert done.stop == "end_token"


def test_the_context_is_the_limit_and_a_prompt_beyond_it_an_error(make_tiny):
    loaded = make_tiny("llama", max_position_embeddings=16)
    engine = engine_of(loaded)
    sampling = Sampling(max_new_tokens=50, end_tokens=(";",), temperature=0.0)
    fits, full, beyond, empty = engine.generate(
        [Request(tuple([5] * n), 1, 50) for n in (10, 15, 16, 0)], sampling
    )
    assert (fits.stop, len(fits.tokens)) == ("context", 6)
    assert (full.stop, len(full.tokens)) == ("context", 1)
    assert (beyond.stop, beyond.tokens) == ("error:prompt_too_long", ())
    assert empty.stop == "error:empty_prompt"


def test_logits_that_are_not_finite_end_their_sequence_as_an_error(make_tiny):
    loaded = make_tiny("llama")
    engine = engine_of(loaded)
    with torch.no_grad():
        loaded.module.get_output_embeddings().weight[3] = float("nan")
    done = engine.generate(requests(loaded), SAMPLINGS["plain"])
    assert {c.stop for c in done} == {"error:non_finite_logits"}
    assert all(c.tokens == () for c in done)


def test_the_version_is_stamped_and_new_weights_are_seen_at_once(make_tiny):
    loaded = make_tiny("llama")
    engine = engine_of(loaded)
    greedy = Sampling(temperature=0.0, max_new_tokens=12)
    before = engine.generate(requests(loaded), greedy)
    with torch.no_grad():
        loaded.module.get_output_embeddings().weight.neg_()
    engine.load(7)
    after = engine.generate(requests(loaded), greedy)
    assert {c.version for c in before} == {0}
    assert {c.version for c in after} == {7}
    assert [c.tokens for c in before] != [c.tokens for c in after]


def test_no_requests_no_completions_and_close_twice(tiny_llama):
    engine = engine_of(tiny_llama)
    assert engine.generate([], SAMPLINGS["plain"]) == []
    engine.close()
    engine.close()


# the sampler

def test_uniform_numbers_depend_on_key_and_index_only_and_are_uniform():
    stream = np.full(100_000, 12345, dtype=np.uint64)
    u = uniforms(stream, np.arange(100_000))
    assert np.array_equal(u[777:778], uniforms(stream[:1], np.array([777])))
    assert u.min() >= 0 and u.max() < 1
    counts, _ = np.histogram(u, bins=20, range=(0, 1))
    assert ((counts - 5000) ** 2 / 5000).sum() < 45          # chi-square, 19 degrees of freedom, p = 0.0007
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(u, uniforms(stream + np.uint64(1), np.arange(100_000)))[0, 1]) < 0.01


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5), Sampling(top_k=3), Sampling(top_p=0.7), Sampling(min_p=0.2)])
def test_draws_follow_the_distribution(sampling):
    torch.manual_seed(0)
    logits = torch.randn(1, 700) * 3
    n = 40_000
    u = uniforms(np.arange(n, dtype=np.uint64), np.zeros(n))
    token, logp = draw(logits.expand(n, -1), u, sampling)
    prob = sampling_logits(logits, **sampling.distribution).softmax(-1)[0]
    freq = torch.bincount(token, minlength=700) / n
    assert float((freq - prob).abs().max()) < 4 * (0.25 / n) ** 0.5
    assert bool((prob[token] > 0).all())
    torch.testing.assert_close(logp, prob[token].log(), rtol=1e-4, atol=1e-4)


def test_filters_keep_what_they_say():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def kept(**values):
        return torch.isfinite(sampling_logits(logits, **{**plain, **values}))[0].tolist()

    assert kept() == [True] * 4
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_p=0.5) == [True, False, False, False]
    assert kept(top_p=0.6) == [True, True, False, False]
    assert kept(min_p=0.3) == [True, True, True, False]
    assert kept(top_k=3, top_p=0.8) == [True, True, False, False]
    forced = sampling_logits(logits, **{**plain, "top_k": 1}, keep=torch.tensor([3]))
    assert torch.isfinite(forced)[0].tolist() == [True, False, False, True]


def test_an_edge_never_gives_a_token_without_probability():
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [3, 300, 599]] = 0.0
    for u in (0.0, 1 / 3, 2 / 3, 1 - 2**-53):
        token, _ = draw(logits, np.array([u]), Sampling())
        assert int(token) in (3, 300, 599)


def test_nothing_is_taken_from_the_models_own_generation_settings(make_tiny):
    plain, opinionated = make_tiny("llama"), make_tiny("llama")
    settings = opinionated.module.generation_config
    settings.do_sample, settings.temperature, settings.top_k, settings.eos_token_id, settings.max_new_tokens = True, 0.1, 1, [5, 6, 7, 8], 2
    assert engine_of(plain).generate(requests(plain), SAMPLINGS["plain"]) == engine_of(opinionated).generate(
        requests(opinionated), SAMPLINGS["plain"]
    )


def test_a_nan_of_one_sequence_does_not_stay_in_the_cache(make_tiny):
    loaded = make_tiny("llama")
    engine = engine_of(loaded)
    good = engine.generate(requests(loaded), SAMPLINGS["plain"])
    embedding = loaded.module.get_input_embeddings().weight
    kept = embedding.detach().clone()
    with torch.no_grad():
        embedding.fill_(float("nan"))
    assert all(c.stop.startswith("error:") for c in engine.generate(requests(loaded), SAMPLINGS["plain"]))
    with torch.no_grad():
        embedding.copy_(kept)
    assert engine.generate(requests(loaded), SAMPLINGS["plain"]) == good


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_architectures_that_scale_their_logits(name, dtype):
    """The split into body and head knows the scaling, in either precision."""
    from conftest import ALPHABET

    from burnish.config import Model, Scratch
    from burnish.models.load import load

    extra = {
        "gemma2": {"head_dim": 16, "final_logit_softcapping": 5.0}, "granite": {"logits_scaling": 10.0}, "cohere": {"logit_scale": 0.3},
    }
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    loaded = load(Model(scratch=Scratch(alphabet=ALPHABET, model_type=name, config={**size, **extra[name]})), seed=0)
    state_of(loaded, dtype=dtype)
    asked = requests(loaded)
    done = engine_of(loaded).generate(asked, Sampling(max_new_tokens=8))
    assert all(c.stop in ("max_tokens", "end_token") for c in done)
