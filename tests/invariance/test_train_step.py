"""T1 split, T2 poison, T3 lr 0, T4 solo and batch, T15 it trains, T16 not finite, T21 metrics: over all losses and reductions."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from parts import CLIP, GRPO, PLAIN, adv_of, on_policy, random_rows, state_of, weights_of

from burnish.algorithms import policy_losses, reduce
from burnish.algorithms.penalties import KlController
from burnish.algorithms.reduce import token_mean
from burnish.trainer import COLUMNS, Algorithm, KlTerm, NonFiniteError, NothingMovedError, train_step
from burnish.trainer.columns import collate, micro_batches, score, score_rows
from burnish.types import Batch

VALUES = {
    "eps_low": 0.2, "eps_high": 0.28, "length": 30, "ratio_min": 0.0, "ratio_max": 5.0, "tau_pos": 1.0, "tau_neg": 1.05, "delta_low": 0.2,
    "delta_high": 0.15, "log_clip_low": 0.4, "log_clip_high": 0.4,
}
ONE = {"sampling": PLAIN, "lr_of": lambda u: 1e-3, "clip_norm": 1.0}


def functions_of(room):
    """Each public function of a room that takes what its place provides, with values for what it needs beyond that."""
    provided = {*COLUMNS, "loss", "mask", "num_tokens", "num_rollouts"}
    for name, fn in inspect.getmembers(room, inspect.isfunction):
        if name.startswith("_") or fn.__module__ != room.__name__ or name == "masked":
            continue
        if not {"logp_cur", "loss"} & set(inspect.signature(fn).parameters):
            continue
        needs = [n for n, p in inspect.signature(fn).parameters.items() if p.default is p.empty and n not in provided]
        yield name, partial(fn, **{n: VALUES[n] for n in needs})


LOSSES = dict(functions_of(policy_losses))
REDUCTIONS = dict(functions_of(reduce))
GRADIENTS = ("naive", "straight_through_k2", "importance_weighted")
KLS = [None, *((k, g) for k in ("k1", "k2", "k3") for g in GRADIENTS)]


def kl_term(names):
    return KlTerm(*names, KlController(0.1)) if names else None


def gradient(loaded, rows, algo, *, tokens, monkeypatch):
    """The gradient of one update before clip and step, and its metrics."""
    state = state_of(loaded)
    caught = {}
    monkeypatch.setattr("burnish.trainer.step._apply", lambda state, finite, tally, **_: caught.update(
        {n: m.grad.clone() for n, m in state.weights.masters.items()}))
    metrics = train_step(state, Batch(tuple(rows)), algo, tokens_per_micro_batch=tokens, **ONE)
    state.weights.clear_grads()
    return caught, metrics


def test_the_rooms_are_enumerated():
    assert {"ppo_clip", "reinforce", "importance_sampling"} <= LOSSES.keys()
    assert {"token_mean", "rollout_mean", "rollout_sum", "rollout_sum_over", "token_sum"} <= REDUCTIONS.keys()


@pytest.mark.parametrize("kl", KLS, ids=lambda k: "-".join(k) if k else "no_kl")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_any_split_gives_the_same_gradient(tiny_llama, loss, reduction, kl, monkeypatch):
    rows = random_rows(7, ref=True)
    algo = Algorithm(LOSSES[loss], REDUCTIONS[reduction], kl_term(kl))
    whole, metrics = gradient(tiny_llama, rows, algo, tokens=100_000, monkeypatch=monkeypatch)
    largest = max(float(g.abs().max()) for g in whole.values())
    for tokens in (1, 60):
        split, split_metrics = gradient(tiny_llama, rows, algo, tokens=tokens, monkeypatch=monkeypatch)
        for name in whole:
            torch.testing.assert_close(split[name], whole[name], rtol=1e-4, atol=1e-5 * largest, msg=name)
        assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_row_order_does_not_matter(tiny_llama, monkeypatch):
    rows = random_rows(6)
    one, _ = gradient(tiny_llama, rows, GRPO, tokens=64, monkeypatch=monkeypatch)
    other, _ = gradient(tiny_llama, rows[::-1], GRPO, tokens=64, monkeypatch=monkeypatch)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_stands_where_nothing_was_sampled_changes_nothing(tiny_llama, loss, poison, monkeypatch):
    rows = random_rows(5, ref=True)
    algo = Algorithm(LOSSES[loss], token_mean, kl_term(("k3", "naive")))

    def poisoned(row):
        put = lambda values: tuple(v if s else poison for v, s in zip(values, row.mask, strict=True))  # noqa: E731
        return replace(row, columns={name: put(values) for name, values in row.columns.items()})

    clean, clean_metrics = gradient(tiny_llama, rows, algo, tokens=50, monkeypatch=monkeypatch)
    dirty, dirty_metrics = gradient(tiny_llama, [poisoned(r) for r in rows], algo, tokens=50, monkeypatch=monkeypatch)
    assert all(torch.equal(clean[n], dirty[n]) for n in clean)
    assert clean_metrics == dirty_metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lr_zero_stays_where_it_is(make_tiny, dtype):
    state = state_of(make_tiny("llama"), dtype=dtype)
    before = weights_of(state)
    rows = random_rows(6)
    for _ in range(50):
        metrics = train_step(state, on_policy(state, rows), GRPO, sampling=PLAIN, lr_of=lambda u: 0.0, clip_norm=1.0, epochs=2)
        assert metrics["train/clip_frac"] == 0.0
        assert abs(metrics["train/kl_cur_gen_nats"]) < 1e-9
    assert all(torch.equal(before[n], m) for n, m in state.weights.masters.items())
    assert state.updates == 100


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "gemma3", "mixtral", "qwen3_moe"])
def test_a_row_scores_the_same_alone_and_with_others(make_tiny, name):
    state = state_of(make_tiny(name))
    rows = random_rows(6)
    together = score_rows(state.policy, rows, sampling=PLAIN, tokens_per_micro_batch=10_000)
    alone = [score_rows(state.policy, [r], sampling=PLAIN, tokens_per_micro_batch=1)[0] for r in rows]
    for a, b in zip(together, alone, strict=True):
        assert a == pytest.approx(b, abs=2e-5)


def test_log_probs_equal_those_of_the_plain_forward(tiny_llama):
    state = state_of(tiny_llama)
    row = random_rows(1, seed=3)[0]
    (got,) = score_rows(state.policy, [row], sampling=PLAIN, tokens_per_micro_batch=100)
    with torch.no_grad():
        logp = tiny_llama.module(torch.tensor([row.tokens])).logits[0].log_softmax(-1)
    expected = [float(logp[t - 1, row.tokens[t]]) if row.mask[t] else 0.0 for t in range(len(row.tokens))]
    assert list(got) == pytest.approx(expected, abs=1e-5)


def test_the_metrics_are_those_worked_out_by_hand(tiny_llama):
    state = state_of(tiny_llama)
    rows = random_rows(5, ref=True)
    rows = [row.put(logp_prox=row.columns["logp_gen"]) for row in rows]
    logp = score_rows(state.policy, rows, sampling=PLAIN, tokens_per_micro_batch=10_000)
    at = [(i, t) for i, r in enumerate(rows) for t in range(len(r.tokens)) if r.mask[t]]
    ratio = [logp[i][t] - rows[i].columns["logp_gen"][t] for i, t in at]
    k3_gen = [math.exp(d) - 1 - d for d in ratio]
    k3_ref = [math.exp(-(logp[i][t] - rows[i].columns["logp_ref"][t])) - 1 + (logp[i][t] - rows[i].columns["logp_ref"][t]) for i, t in at]
    clipped = [
        max(-math.exp(d) * adv_of(rows[i]), -min(max(math.exp(d), 0.8), 1.28) * adv_of(rows[i])) > -math.exp(d) * adv_of(rows[i])
        for d, (i, _) in zip(ratio, at, strict=True)
    ]
    metrics = train_step(state, Batch(tuple(rows)), GRPO, tokens_per_micro_batch=40, sampling=PLAIN, lr_of=lambda u: 0.0, clip_norm=1e9)
    assert metrics["train/kl_cur_gen_nats"] == pytest.approx(sum(k3_gen) / len(at), rel=1e-4)
    assert metrics["train/kl_cur_ref_nats"] == pytest.approx(sum(k3_ref) / len(at), rel=1e-4)
    assert metrics["train/clip_frac"] == pytest.approx(sum(clipped) / len(at))
    assert metrics["train/tokens_count"] == len(at)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_moves_the_policy_the_way_the_advantages_say(make_tiny, loss, dtype):
    state = state_of(make_tiny("llama"), dtype=dtype)
    rows = [r.put(adv=1.0 if i % 2 else -1.0) for i, r in enumerate(random_rows(8))]
    batch = on_policy(state, rows)
    before = weights_of(state)
    metrics = train_step(state, batch, Algorithm(LOSSES[loss], token_mean), **ONE)
    after = score_rows(state.policy, batch.rows, sampling=PLAIN, tokens_per_micro_batch=10_000)
    gain = sum(adv_of(r) * (sum(new) - sum(r.columns["logp_gen"])) for r, new in zip(batch.rows, after, strict=True))
    assert gain > 0
    assert 0 < metrics["train/grad_norm"] < math.inf
    assert any(not torch.equal(before[n], m) for n, m in state.weights.masters.items())
    assert state.version == 1


def test_at_ratio_one_the_clip_is_plain_reinforce(tiny_llama, monkeypatch):
    rows = list(on_policy(state_of(tiny_llama), random_rows(5)).rows)
    one, _ = gradient(tiny_llama, rows, GRPO, tokens=1000, monkeypatch=monkeypatch)
    other, _ = gradient(tiny_llama, rows, Algorithm(policy_losses.reinforce, token_mean), tokens=1000, monkeypatch=monkeypatch)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-7)


def test_bfloat16_gradients_are_those_of_float32_up_to_rounding(make_tiny, monkeypatch):
    rows = random_rows(6)
    exact, _ = gradient(make_tiny("llama"), rows, GRPO, tokens=50, monkeypatch=monkeypatch)
    rounded, _ = gradient_of_bf16(make_tiny("llama"), rows, monkeypatch)
    dot = sum(float((exact[n] * rounded[n]).sum()) for n in exact)
    length = math.prod(math.sqrt(sum(float((g[n] ** 2).sum()) for n in exact)) for g in (exact, rounded))
    assert dot / length > 0.99


def gradient_of_bf16(loaded, rows, monkeypatch):
    state = state_of(loaded, dtype="bfloat16")
    assert all(p.dtype is torch.bfloat16 for p in loaded.module.parameters())
    assert all(b.dtype is torch.float32 for b in loaded.module.buffers() if b.is_floating_point())
    caught = {}
    monkeypatch.setattr("burnish.trainer.step._apply", lambda state, *_, **__: caught.update(
        {n: m.grad.clone() for n, m in state.weights.masters.items()}))
    return caught, train_step(state, Batch(tuple(rows)), GRPO, tokens_per_micro_batch=50, **ONE)


@pytest.mark.parametrize("where", ["advantage", "ratio", "weight"])
def test_a_step_that_is_not_finite_is_skipped_and_the_run_stops_after_k(make_tiny, where):
    state = state_of(make_tiny("llama"))
    rows = random_rows(4)
    good = on_policy(state, rows)
    train_step(state, good, GRPO, **ONE)
    bad = {
        "advantage": lambda: Batch((good.rows[0].put(adv=math.nan), *good.rows[1:])),
        "ratio": lambda: Batch(tuple(r.put(logp_prox=-1e4 if i == 0 else -1.0, adv=-1.0) for i, r in enumerate(good.rows))),
        "weight": lambda: good,
    }[where]()
    if where == "weight":
        with torch.no_grad():
            state.weights.masters["lm_head.weight"][5, 5] = math.nan
    before, moments = weights_of(state), state.tensors()["adam"]["lm_head.weight/exp_avg"].clone()
    for k in (1, 2):
        metrics = train_step(state, bad, GRPO, max_skipped=3, **ONE)
        assert metrics["train/skipped_updates_count"] == 1
        assert state.skipped_in_a_row == k
    with pytest.raises(NonFiniteError, match="is not finite, now for 3 updates in a row"):
        train_step(state, bad, GRPO, max_skipped=3, **ONE)
    for name, m in state.weights.masters.items():
        assert torch.equal(before[name].nan_to_num(), m.nan_to_num())
    assert torch.equal(moments, state.tensors()["adam"]["lm_head.weight/exp_avg"])
    assert state.version == 1


def test_a_good_step_ends_a_row_of_bad_ones(make_tiny):
    state = state_of(make_tiny("llama"))
    good = on_policy(state, random_rows(4))
    bad = Batch((good.rows[0].put(adv=math.nan), *good.rows[1:]))
    for batch in (bad, bad, good, bad, bad):
        train_step(state, batch, GRPO, max_skipped=3, **ONE)
    assert (state.skipped, state.skipped_in_a_row, state.version) == (4, 2, 1)


def test_a_step_that_moves_nothing_is_an_error(make_tiny):
    state = state_of(make_tiny("llama"))
    with pytest.raises(NothingMovedError, match=r"raise optim\.lr"):
        train_step(state, on_policy(state, random_rows(4)), GRPO, sampling=PLAIN, lr_of=lambda u: 1e-30, clip_norm=1.0)


def test_a_batch_without_a_signal_makes_no_update_but_keeps_the_schedule(make_tiny):
    state = state_of(make_tiny("llama"))
    before = weights_of(state)
    train_step(state, Batch(tuple(r.put(adv=0.0) for r in random_rows(4))), GRPO, epochs=2, minibatches=2, **ONE)
    train_step(state, Batch(()), GRPO, epochs=2, minibatches=2, **ONE)
    assert (state.updates, state.version) == (8, 0)
    assert all(torch.equal(before[n], m) for n, m in state.weights.masters.items())


def test_clipping_bounds_the_gradient_and_reports_it_before(make_tiny, monkeypatch):
    seen = {}
    state = state_of(make_tiny("llama"))
    step = state.optimizer.step
    state.optimizer.step = lambda: (seen.update(norm=float(state.weights.grad_norm())), step())
    metrics = train_step(state, on_policy(state, random_rows(6)), GRPO, sampling=PLAIN, lr_of=lambda u: 1e-3, clip_norm=1e-3)
    assert metrics["train/grad_norm"] > 1e-3
    assert seen["norm"] == pytest.approx(1e-3, rel=1e-3)


def test_minibatches_and_epochs_visit_each_row_once_a_pass(make_tiny, monkeypatch):
    state = state_of(make_tiny("llama"))
    seen = []

    def noting(rows, index, **kwargs):
        seen.extend(rows[i].tokens for i in index)
        return collate(rows, index, **kwargs)

    monkeypatch.setattr("burnish.trainer.step.collate", noting)
    rows = random_rows(10)
    train_step(state, on_policy(state, rows), GRPO, epochs=3, minibatches=4, **ONE)
    assert state.updates == 12
    assert sorted(seen) == sorted([r.tokens for r in rows] * 3)


def test_the_proximal_log_probs_are_those_at_the_start_of_the_step(make_tiny):
    seen = []

    def loss(logp_cur, logp_prox, adv):
        seen.append((logp_cur.detach().clone(), logp_prox.clone()))
        return CLIP(logp_cur, logp_prox, adv)

    state = state_of(make_tiny("llama"))
    train_step(state, on_policy(state, random_rows(4)), Algorithm(loss, token_mean), epochs=3, **ONE)
    torch.testing.assert_close(seen[0][0], seen[0][1])
    assert torch.equal(seen[0][1], seen[2][1])
    assert not torch.equal(seen[2][0], seen[2][1])


def test_micro_batches_hold_the_budget_and_start_with_the_largest():
    rows = random_rows(40)
    groups = micro_batches(rows, tokens_per_micro_batch=80)
    assert sorted(i for g in groups for i in g) == list(range(40))
    sizes = [len(g) * max(len(rows[i].tokens) for i in g) for g in groups]
    assert all(size <= 80 for size in sizes)
    lengths = [max(len(rows[i].tokens) for i in g) for g in groups]
    assert lengths == sorted(lengths, reverse=True)


def test_a_row_whose_first_token_is_sampled_is_refused(tiny_llama):
    row = replace(random_rows(1)[0], mask=(True,) * len(random_rows(1)[0].tokens))
    with pytest.raises(ValueError, match="nothing precedes it"):
        score(state_of(tiny_llama).policy, collate([row], [0], device=torch.device("cpu")), PLAIN)


def test_a_loss_that_names_the_entropy_has_its_gradient(make_tiny):
    """Without an advantage anywhere, an entropy bonus alone makes the policy less certain."""

    def loss(logp_cur, adv, entropy):
        return -adv * logp_cur - 0.1 * entropy

    loaded = make_tiny("llama")
    with torch.no_grad():
        loaded.module.get_output_embeddings().weight.mul_(20)
    state = state_of(loaded)
    rows = [r.put(adv=0.0) for r in random_rows(6)]
    seen = [train_step(state, on_policy(state, rows), Algorithm(loss, token_mean), **ONE)["train/entropy_nats"] for _ in range(8)]
    assert seen[-1] > seen[0] + 0.01


def test_any_seed_trains(make_tiny):
    state = state_of(make_tiny("llama"))
    before = torch.random.get_rng_state()
    train_step(state, on_policy(state, random_rows(3)), GRPO, seed=2**63 - 1, **ONE)
    assert torch.equal(before, torch.random.get_rng_state())
    train_step(state, on_policy(state, random_rows(3)), GRPO, seed=2**63 - 1, dropout=True, **ONE)


def test_updates_that_were_skipped_are_not_counted_as_trained_on(make_tiny):
    state = state_of(make_tiny("llama"))
    good = on_policy(state, random_rows(4))
    metrics = train_step(state, Batch((good.rows[0].put(adv=math.nan), *good.rows[1:])), GRPO, **ONE)
    assert (metrics["train/rollouts_count"], metrics["train/tokens_count"]) == (0, 0)


@pytest.mark.parametrize(("wrong", "said"), [
    (lambda logp_cur, adv: None, "the loss returned a NoneType"), (lambda logp_cur, adv: -logp_cur.detach() * adv, "has no gradient"),
])
def test_a_loss_that_gives_nothing_to_learn_is_refused(make_tiny, wrong, said):
    state = state_of(make_tiny("llama"))
    with pytest.raises(ValueError, match=said):
        train_step(state, on_policy(state, random_rows(4)), Algorithm(wrong, token_mean), **ONE)


@pytest.mark.parametrize("wrong", [lambda logp_cur, adv: -(logp_cur * adv).mean(), lambda logp_cur, adv: -(logp_cur * adv).sum(-1)])
def test_a_loss_that_is_not_one_number_per_token_is_refused(make_tiny, wrong):
    state = state_of(make_tiny("llama"))
    with pytest.raises(ValueError, match=r"one number per token.*algo\.reduce"):
        train_step(state, on_policy(state, random_rows(4)), Algorithm(wrong, token_mean), **ONE)


def test_a_tiny_learning_rate_at_the_end_of_a_schedule_is_no_error(make_tiny):
    state = state_of(make_tiny("llama"))
    train_step(state, on_policy(state, random_rows(4)), GRPO, sampling=PLAIN, lr_of=lambda u: 1e-12, clip_norm=1.0)
    assert state.version == 1


def test_weights_that_overflow_end_the_run_at_once(make_tiny):
    state = state_of(make_tiny("llama"))
    with pytest.raises(NonFiniteError, match="made weights that are not finite"):
        train_step(state, on_policy(state, random_rows(4)), GRPO, sampling=PLAIN, lr_of=lambda u: 3e38, clip_norm=1.0)
