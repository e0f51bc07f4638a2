"""T1 split, T2 poison, T15 it trains, T16 shapes, and equality with plain transformers and sums by hand: answers and teachers."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from parts import PLAIN, random_rows, state_of, weights_of

from burnish.algorithms import divergences, reduce, token_losses
from burnish.algorithms.advantages import teacher_gap
from burnish.algorithms.divergences import forward_kl, generalized_jsd, reverse_kl
from burnish.algorithms.policy_losses import reinforce
from burnish.algorithms.reduce import rollout_mean, token_mean, token_sum
from burnish.algorithms.token_losses import cross_entropy, dft
from burnish.models.policy import Policy
from burnish.trainer import Algorithm, ShapeError, Teachers, train_step
from burnish.trainer.columns import score_rows
from burnish.trainer.tokens import DivergenceObjective, TokenObjective, against_teachers, token_means
from burnish.types import Batch, Row

ONE = {"sampling": PLAIN, "lr_of": lambda u: 1e-3, "clip_norm": 1.0}
SHARP = {"initializer_range": 0.3}             # a teacher that is sure of something


def functions_of(room, first):
    values = {"length": 30, "beta": 0.3}
    for name, fn in inspect.getmembers(room, inspect.isfunction):
        names = list(inspect.signature(fn).parameters)
        if fn.__module__ == room.__name__ and not name.startswith("_") and names[0] == first and (first != "loss" or "num_tokens" in names):
            yield name, partial(fn, **{n: v for n, v in values.items() if n in names})


LOSSES = dict(functions_of(token_losses, "logp_cur"))
DIVERGENCES = dict(functions_of(divergences, "logits_cur"))
REDUCTIONS = dict(functions_of(reduce, "loss"))


@pytest.fixture(scope="module")
def teachers(make_tiny):
    """Two, of unequal weights."""
    return Teachers([Policy(make_tiny("llama", seed=seed, **SHARP).module.requires_grad_(False)) for seed in (5, 6)], [3.0, 1.0])


def against(teachers, divergence, *, temperature=1.0):
    return against_teachers(teachers.policies, teachers.weights, divergence, temperature=temperature)


def distill(teachers, divergence, reduction=token_mean, **values):
    return DivergenceObjective(against(teachers, divergence, **values), reduction)


def gradient(loaded, rows, objective, monkeypatch, *, tokens=100_000):
    """The gradient of one update before clip and step, and its metrics."""
    state, caught = state_of(loaded), {}
    with monkeypatch.context() as patch:
        patch.setattr("burnish.trainer.step._apply", lambda state, *_, **__: caught.update(
            {n: m.grad.clone() for n, m in state.weights.masters.items()}))
        metrics = train_step(state, Batch(tuple(rows)), objective, tokens_per_micro_batch=tokens, **ONE)
    state.weights.clear_grads()
    return caught, metrics


def by_hand(loaded, loss):
    """The gradient of a loss that was computed from the module itself."""
    loaded.module.zero_grad()
    loss.backward()
    found = {n: p.grad.clone() for n, p in loaded.module.named_parameters()}
    loaded.module.zero_grad(set_to_none=True)
    return found


def close(one, other, *, rtol=1e-4):
    largest = max(float(g.abs().max()) for g in other.values())
    for name in other:
        torch.testing.assert_close(one[name], other[name], rtol=rtol, atol=1e-5 * largest, msg=name)


def logits_at(module, row):
    """Logits at which the tokens of the mask are predicted. -> [n,V]"""
    return module(torch.tensor([row.tokens])).logits[0][[t - 1 for t, m in enumerate(row.mask) if m]]


def test_the_rooms_are_enumerated():
    assert {"cross_entropy", "dft"} <= LOSSES.keys()
    assert {"forward_kl", "reverse_kl", "generalized_jsd"} <= DIVERGENCES.keys()
    assert {"token_mean", "rollout_mean"} <= REDUCTIONS.keys()


# T1, T2

@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", [*LOSSES, *DIVERGENCES])
def test_any_split_gives_the_same_gradient_and_metrics(tiny_llama, teachers, name, reduction, monkeypatch):
    rows = random_rows(7)
    fn = REDUCTIONS[reduction]
    objective = TokenObjective(LOSSES[name], fn) if name in LOSSES else distill(teachers, DIVERGENCES[name], fn, temperature=0.7)
    whole, metrics = gradient(tiny_llama, rows, objective, monkeypatch)
    for tokens in (1, 60):
        split, split_metrics = gradient(tiny_llama, rows, objective, monkeypatch, tokens=tokens)
        close(split, whole)
        assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", [*LOSSES, *DIVERGENCES])
def test_what_is_not_learned_changes_nothing(tiny_llama, teachers, name, poison, monkeypatch):
    """Columns of other methods, and what a teacher thinks of tokens that are not the answer's."""

    class Poisoned:
        def __init__(self, policy, mask_of):
            self.policy, self.mask_of, self.logits = policy, mask_of, policy.logits

        def hidden(self, token_BT):
            hidden = self.policy.hidden(token_BT)
            for b, tokens in enumerate(token_BT.tolist()):
                mask = self.mask_of[tuple(tokens)]
                for t in range(len(tokens)):
                    if t + 1 >= len(mask) or not mask[t + 1]:
                        hidden[b, t] = poison
            return hidden

    rows = [replace(row, columns={}) for row in random_rows(5)]
    dirty = [row.put(adv=(poison,) * len(row.tokens), logp_gen=(poison,) * len(row.tokens)) for row in rows]
    masks = {row.tokens: row.mask for row in rows}
    bad = Teachers([Poisoned(p, masks) for p in teachers.policies], [3.0, 1.0])
    objectives = [TokenObjective(LOSSES[name], token_mean)] * 2 if name in LOSSES else [
        distill(models, DIVERGENCES[name]) for models in (teachers, bad)]
    clean, clean_metrics = gradient(tiny_llama, rows, objectives[0], monkeypatch, tokens=1)
    same, metrics = gradient(tiny_llama, dirty, objectives[1], monkeypatch, tokens=1)
    assert all(torch.equal(clean[n], same[n]) for n in clean)
    assert {n: metrics[n] for n in ("train/loss", "train/nll_nats")} == {n: clean_metrics[n] for n in ("train/loss", "train/nll_nats")}


# equality: answers

@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "qwen3"])
def test_cross_entropy_is_that_of_plain_transformers(make_tiny, name, monkeypatch):
    """Value and gradient of the model's own forward with labels, on the padded batch (token_mean) and row by row (rollout_mean)."""
    loaded, rows = make_tiny(name), random_rows(6)
    length = max(len(r.tokens) for r in rows)
    pad = lambda values, filler: [*values, *[filler] * (length - len(values))]  # noqa: E731
    tokens = torch.tensor([pad(r.tokens, 0) for r in rows])
    labels = torch.tensor([pad([t if m else -100 for t, m in zip(r.tokens, r.mask, strict=True)], -100) for r in rows])
    loss_of = lambda t, la: loaded.module(t, labels=la).loss  # noqa: E731
    theirs = {
        token_mean: lambda: loss_of(tokens, labels),
        rollout_mean: lambda: torch.stack([loss_of(t[None], la[None]) for t, la in zip(tokens, labels, strict=True)]).mean(),
    }
    found = {}
    for reduction, theirs_of in theirs.items():
        ours, metrics = gradient(loaded, rows, TokenObjective(cross_entropy, reduction), monkeypatch, tokens=60)
        loss = theirs_of()
        assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        close(ours, by_hand(loaded, loss))
        found[reduction] = metrics
    assert found[token_mean]["train/loss"] == pytest.approx(found[token_mean]["train/nll_nats"])
    assert found[rollout_mean]["train/loss"] != pytest.approx(found[token_mean]["train/loss"], rel=1e-4)
    assert found[rollout_mean]["train/nll_nats"] == pytest.approx(found[token_mean]["train/nll_nats"])


def test_token_mean_and_rollout_mean_agree_where_all_answers_are_equally_long(tiny_llama, monkeypatch):
    rows = [Row(r.tokens[:8], (False,) * 4 + (True,) * 4) for r in random_rows(12) if len(r.tokens) >= 8][:4]
    one, other = (gradient(tiny_llama, rows, TokenObjective(cross_entropy, fn), monkeypatch)[0] for fn in (token_mean, rollout_mean))
    close(one, other)


def test_dft_is_the_cross_entropy_of_each_token_times_its_probability(tiny_llama, monkeypatch):
    rows = random_rows(4)
    ours, metrics = gradient(tiny_llama, rows, TokenObjective(dft, token_mean), monkeypatch)
    logp = torch.cat([
        logits_at(tiny_llama.module, r).log_softmax(-1).gather(1, torch.tensor([[t] for t, m in zip(r.tokens, r.mask, strict=True) if m]))
        for r in rows
    ])
    loss = -(logp.detach().exp() * logp).mean()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    close(ours, by_hand(tiny_llama, loss))


# equality: teachers

@pytest.mark.parametrize(("beta", "published"), [(1.0, "kl of the policy to the teacher"), (0.0, "kl of the teacher to the policy")])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gkd_at_its_ends_is_the_mean_exact_kl(tiny_llama, teachers, beta, published, temperature, monkeypatch):
    rows = random_rows(4)
    one = Teachers(teachers.policies[:1], [1.0])
    ours, metrics = gradient(
        tiny_llama, rows, distill(one, partial(generalized_jsd, beta=beta), temperature=temperature), monkeypatch, tokens=60
    )
    cur = torch.cat([logits_at(tiny_llama.module, r) for r in rows]).div(temperature).log_softmax(-1)
    with torch.no_grad():
        teach = torch.cat([logits_at(one.policies[0].module, r) for r in rows]).div(temperature).log_softmax(-1)
    p, q = (cur, teach) if beta == 1 else (teach, cur)
    loss = (p.exp() * (p - q)).sum(-1).mean()
    assert loss.item() > 0.1
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["train/divergence_nats"] == pytest.approx(loss.item(), rel=1e-4)
    close(ours, by_hand(tiny_llama, loss), rtol=1e-3)


def test_several_teachers_count_by_their_weights(tiny_llama, teachers):
    rows = random_rows(4)
    each = [Teachers([policy], [1.0]) for policy in teachers.policies]
    policy = state_of(tiny_llama).policy
    found = [
        token_means(policy, rows, tokens_per_micro_batch=100, against={"kl": against(t, reverse_kl)})["kl"] for t in (*each, teachers)
    ]
    assert found[2] == pytest.approx(0.75 * found[0] + 0.25 * found[1], rel=1e-5)
    assert abs(found[0] - found[1]) > 0.01


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_teacher_that_is_the_policy_has_nothing_to_teach(make_tiny, name, monkeypatch):
    loaded = make_tiny("llama", **SHARP)
    same = Teachers([Policy(make_tiny("llama", **SHARP).module.requires_grad_(False))], [1.0])
    other = Teachers([Policy(make_tiny("llama", seed=3, **SHARP).module.requires_grad_(False))], [1.0])
    ours, metrics = gradient(loaded, random_rows(4), distill(same, DIVERGENCES[name]), monkeypatch)
    far, _ = gradient(loaded, random_rows(4), distill(other, DIVERGENCES[name]), monkeypatch)
    assert abs(metrics["train/loss"]) < 1e-6
    assert max(float(g.abs().max()) for g in ours.values()) < 1e-6 * max(float(g.abs().max()) for g in far.values()) + 1e-7


def test_the_advantage_of_on_policy_distillation_is_the_gradient_of_the_exact_kl(tiny_llama, teachers, monkeypatch):
    """In expectation: every possible next token stands there once, and counts by how probable the policy finds it."""
    one = Teachers(teachers.policies[:1], [1.0])
    sized = {"sampling": PLAIN, "tokens_per_micro_batch": 5000}
    prompts = [row.tokens[:5] for row in random_rows(3)]
    vocab = tiny_llama.module.config.vocab_size
    exact, _ = gradient(
        tiny_llama, [Row((*p, 0), (False,) * len(p) + (True,)) for p in prompts], distill(one, reverse_kl, token_sum), monkeypatch
    )
    rows = [Row((*p, v), (False,) * len(p) + (True,)) for p in prompts for v in range(vocab)]
    gen = score_rows(state_of(tiny_llama).policy, rows, **sized)
    mask = torch.tensor([r.mask for r in rows[:vocab]]).repeat(3, 1)
    gap = teacher_gap(torch.tensor(one.score(rows, **sized)), torch.tensor(gen), mask)
    weighed = [r.put(logp_gen=g, adv=math.exp(g[-1]) * float(a[-1])) for r, g, a in zip(rows, gen, gap, strict=True)]
    sampled, _ = gradient(tiny_llama, weighed, Algorithm(reinforce, token_sum), monkeypatch)
    close(sampled, exact, rtol=1e-3)


def test_on_policy_distillation_by_samples_points_where_the_exact_kl_does(tiny_llama, teachers, monkeypatch):
    one = Teachers(teachers.policies[:1], [1.0])
    sized = {"sampling": PLAIN, "tokens_per_micro_batch": 20000}
    prompt = random_rows(1)[0].tokens[:5]
    row = Row((*prompt, 0), (False,) * 5 + (True,))
    exact, _ = gradient(tiny_llama, [row], distill(one, reverse_kl), monkeypatch)
    with torch.no_grad():
        prob = logits_at(tiny_llama.module, row)[0].softmax(-1)
    drawn = torch.multinomial(prob, 4000, replacement=True, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [replace(row, tokens=(*prompt, v)) for v in drawn]
    gen = score_rows(state_of(tiny_llama).policy, rows, **sized)
    gap = teacher_gap(torch.tensor(one.score(rows, **sized)), torch.tensor(gen), torch.tensor([r.mask for r in rows]))
    sampled, _ = gradient(
        tiny_llama, [r.put(logp_gen=g, adv=float(a[-1])) for r, g, a in zip(rows, gen, gap, strict=True)],
        Algorithm(reinforce, token_mean), monkeypatch,
    )
    dot = sum(float((exact[n] * sampled[n]).sum()) for n in exact)
    length = math.prod(math.sqrt(sum(float((g[n] ** 2).sum()) for n in exact)) for g in (exact, sampled))
    assert dot / length > 0.9


def test_vocabularies_that_are_padded_to_unequal_sizes_are_compared_on_what_both_have(make_tiny, teachers, monkeypatch):
    wide = make_tiny("llama", seed=5, **SHARP).module
    old = wide.get_output_embeddings().weight.shape[0]
    wide.resize_token_embeddings(old + 7, mean_resizing=False)
    with torch.no_grad():
        wide.get_output_embeddings().weight[old:] = 9.0
    padded, plain = Teachers([Policy(wide.requires_grad_(False))], [1.0]), Teachers(teachers.policies[:1], [1.0])
    rows = random_rows(3)
    one, _ = gradient(make_tiny("llama"), rows, distill(plain, forward_kl), monkeypatch)
    other, _ = gradient(make_tiny("llama"), rows, distill(padded, forward_kl), monkeypatch)
    close(one, other)


# T15, T16, held-out means

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*LOSSES, *DIVERGENCES])
def test_a_few_steps_lower_what_is_minimised(make_tiny, teachers, name, dtype):
    state = state_of(make_tiny("llama"), dtype=dtype)
    before = weights_of(state)
    objective = TokenObjective(LOSSES[name], token_mean) if name in LOSSES else distill(teachers, DIVERGENCES[name])
    batch = Batch(tuple(replace(row, columns={}) for row in random_rows(8)))
    seen = [train_step(state, batch, objective, **ONE) for _ in range(8)]
    value = "train/nll_nats" if name in LOSSES else "train/divergence_nats"
    assert seen[-1][value] < 0.99 * seen[0][value]
    assert all(0 < m["train/grad_norm"] < math.inf for m in seen)
    assert any(not torch.equal(before[n], m) for n, m in state.weights.masters.items())


def test_a_loss_or_divergence_that_is_not_one_number_a_token_is_refused(make_tiny, teachers):
    state = state_of(make_tiny("llama"))
    batch = Batch(tuple(random_rows(3)))
    with pytest.raises(ShapeError, match=r"sft\.loss returned the shape \(\).*sft\.reduce"):
        train_step(state, batch, TokenObjective(lambda logp_cur: -logp_cur.mean(), token_mean), **ONE)
    with pytest.raises(ShapeError, match=r"distill\.divergence returned the shape \(\).*distill\.reduce"):
        train_step(state, batch, distill(teachers, lambda **given: reverse_kl(**given).mean()), **ONE)


def test_held_out_means_are_those_worked_out_by_hand_however_they_are_split(tiny_llama, teachers):
    rows = [*random_rows(5), Row((5, 6, 7), (False,) * 3)]
    policy = state_of(tiny_llama).policy
    compare = {"divergence": against(teachers, reverse_kl)}
    logp = score_rows(policy, rows, sampling=PLAIN, tokens_per_micro_batch=1000)
    each = [token_means(policy, [r], tokens_per_micro_batch=1, against=compare)["divergence"] * r.num_tokens for r in rows[:5]]
    num = sum(r.num_tokens for r in rows)
    for tokens in (1, 70, 10_000):
        found = token_means(policy, rows, tokens_per_micro_batch=tokens, against=compare)
        assert found == pytest.approx({"nll": -sum(map(sum, logp)) / num, "divergence": sum(each) / num}, rel=1e-5)
    assert token_means(policy, rows[5:], tokens_per_micro_batch=100) == {}
    assert token_means(policy, [], tokens_per_micro_batch=100) == {}
