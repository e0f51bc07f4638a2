"""The KL over the whole vocabulary: by hand, in chunks, split, with temperature, beside an adapter, and against estimates by samples."""

from __future__ import annotations

import pytest
import torch
from parts import CLIP, PLAIN, assert_same_gradients, gradients, random_rows, state_of
from tiny import tiny

from burnish.algorithms.penalties import KlController, exact_kl, k1, k2, k3, kl_loss
from burnish.algorithms.reduce import rollout_mean, token_mean, token_sum
from burnish.api import Trainer
from burnish.api.policy_gradient import PolicyGradient
from burnish.config import Lora, Sampling
from burnish.models.logprobs import token_outputs
from burnish.trainer import Against, Algorithm, KlTerm, Reference
from burnish.trainer.columns import collate, score
from burnish.types import Batch, Row


def moved(loaded, *, by=0.05):
    """A state, and the reference that it was before its weights moved."""
    state = state_of(loaded)
    reference = Reference(state.policy)
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for master in state.weights.masters.values():
            master.add_(torch.randn(master.shape, generator=rng), alpha=by)
    state.weights.publish()
    return state, reference


def against(reference, scale=1.0):
    return Against((reference,), (1.0,), lambda cur, ref: exact_kl(cur / scale, ref / scale))


def exact(reference, *, loss=None, reduce=token_mean, coef=1.0, scale=1.0):
    return Algorithm(loss, reduce, kl=KlTerm("exact", "naive", KlController(coef), against(reference, scale)))


@pytest.fixture(scope="module", params=["full", "lora"])
def both(request, make_tiny):
    return moved(make_tiny("llama", lora=Lora(rank=4) if request.param == "lora" else None), by=0.1 if request.param == "lora" else 0.05)


def by_hand(state, reference, row, scale=1.0):
    """KL at each token of the mask, from the plain forward of both models. [N]"""
    token_BT = torch.tensor([row.tokens])
    cur = state.policy.module(token_BT).logits[0] / scale
    with torch.no_grad():
        if state.policy.has_adapter:
            with state.policy.module.disable_adapter():
                ref = state.policy.module(token_BT).logits[0] / scale
        else:
            ref = reference.frozen.module(token_BT).logits[0] / scale
    p, q = cur.softmax(-1), ref.log_softmax(-1)
    kl = (p * (p.log() - q)).sum(-1)
    return torch.stack([kl[t - 1] for t in range(len(row.tokens)) if row.mask[t]])


@pytest.mark.parametrize("scale", [1.0, 0.7, 2.0])
def test_the_column_by_hand(both, scale):
    state, reference = both
    rows = random_rows(4)
    batch = collate(rows, range(4), device="cpu")
    with torch.no_grad():
        got = score(state.policy, batch, Sampling(temperature=scale), needs=(), against={"divergence": against(reference, scale)})
        for b, row in enumerate(rows):
            want = by_hand(state, reference, row, scale)
            assert float(want.mean()) > 0.003
            torch.testing.assert_close(got["divergence"][b][batch.mask_BT[b]], want, rtol=1e-4, atol=1e-5)
    assert bool((got["divergence"][~batch.mask_BT] == 0).all())


@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_the_gradient_by_hand_and_in_chunks(both, chunk, monkeypatch):
    state, reference = both
    monkeypatch.setitem(token_outputs.__kwdefaults__, "chunk", chunk)
    rows = random_rows(4)
    (got,), metrics = gradients(state, Batch(tuple(rows)), exact(reference, coef=0.5))
    kls = torch.cat([by_hand(state, reference, row) for row in rows])
    (0.5 * kls.mean()).backward()
    want = {n: m.grad.clone() for n, m in state.weights.masters.items() if m.grad is not None}
    state.weights.clear_grads()
    assert_same_gradients([got], [want])
    assert any(float(g.abs().max()) > 0 for g in got.values())
    assert metrics["train/kl_cur_ref_nats"] == pytest.approx(float(kls.detach().mean()), rel=1e-4)
    assert metrics["train/loss"] == pytest.approx(0.5 * float(kls.detach().mean()), rel=1e-4)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("reduce", [token_mean, rollout_mean])
def test_any_split_gives_the_same_gradient_and_metrics(both, reduce, minibatches):
    state, reference = both
    batch, algo = Batch(tuple(random_rows(6))), exact(reference, loss=CLIP, reduce=reduce, coef=0.3)
    whole, metrics = gradients(state, batch, algo, minibatches=minibatches)
    for tokens in (1, 60):
        split, found = gradients(state, batch, algo, minibatches=minibatches, tokens_per_micro_batch=tokens)
        assert_same_gradients(split, whole)
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_nothing_moved_nothing_is_lost(make_tiny):
    for lora in (None, Lora(rank=4)):
        state = state_of(make_tiny("llama", lora=lora))
        (found,), metrics = gradients(state, Batch(tuple(random_rows(3))), exact(Reference(state.policy)))
        assert metrics["train/kl_cur_ref_nats"] == pytest.approx(0, abs=1e-7)
        assert max(float(g.abs().max()) for g in found.values()) < 1e-6


def test_the_estimators_have_it_as_their_expectation():
    """Over all tokens, each as often as the policy draws it: the values of k1 and k3, and the gradients of k2 and of weighted ones."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 30, generator=rng, dtype=torch.float64).requires_grad_()
    ref = torch.randn(5, 30, generator=rng, dtype=torch.float64)
    kl = exact_kl(logits, ref)
    (grad,) = torch.autograd.grad(kl.sum(), logits)
    logp, logp_ref = logits.log_softmax(-1), ref.log_softmax(-1)
    chance = logp.detach().exp()
    for estimator in (k1, k3):
        torch.testing.assert_close((chance * estimator(logp, logp_ref)).sum(-1), kl)
    for estimator, how in (("k2", "naive"), ("k1", "importance_weighted"), ("k3", "importance_weighted"), ("k3", "straight_through_k2")):
        term = kl_loss(logp, logp.detach(), logp_ref, estimator=estimator, gradient=how)
        (expected,) = torch.autograd.grad((chance * term).sum(), logits, retain_graph=True)
        torch.testing.assert_close(expected, grad)
    (wrong,) = torch.autograd.grad((chance * k3(logp, logp_ref)).sum(), logits)
    assert not torch.allclose(wrong, grad, rtol=0.1)


def test_one_row_has_the_gradient_of_k2_over_all_its_next_tokens(both):
    """The same through the trainer: a row for each token that could follow, weighed by how probable it is."""
    state, reference = both
    prompt = (3, 9, 4)
    with torch.no_grad():
        chance = state.policy.logits(state.policy.hidden(torch.tensor([prompt]))[0, -1]).softmax(-1)
    rows = [Row((*prompt, v), (False, False, False, True), {}).put(adv=float(p)) for v, p in enumerate(chance)]
    logp_ref = reference.score(rows, sampling=PLAIN, tokens_per_micro_batch=10_000)
    rows = [row.put(logp_ref=values) for row, values in zip(rows, logp_ref, strict=True)]

    def expected_k2(logp_cur, logp_ref, adv):
        return adv * k2(logp_cur, logp_ref)

    sampled, _ = gradients(state, Batch(tuple(rows)), Algorithm(expected_k2, token_sum))
    whole, _ = gradients(state, Batch((rows[7],)), exact(reference, reduce=token_sum))
    assert_same_gradients(whole, sampled, rtol=1e-3, atol=1e-4)


# whole runs

@pytest.fixture
def watch(monkeypatch):
    steps = []
    update = PolicyGradient.update

    def watched(self, batch):
        metrics = update(self, batch)
        steps.append({"batch": batch, "metrics": metrics, "learner": self})
        return metrics

    monkeypatch.setattr(PolicyGradient, "update", watched)
    return steps


RUN = {"tasks.held_out": 0, "evaluate.every_steps": 0, "train.steps": 4, "optim.lr": 1e-2, "optim.warmup_updates": 0}


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_run_compares_with_its_start_under_its_temperature(tmp_path, watch, lora):
    kl = {"coef": 0.1, "estimator": "exact"}
    Trainer(tiny({**RUN, "algo.kl": kl, "sampling.temperature": 0.8, "model.lora": lora}), out=tmp_path / "run").run()
    assert watch[0]["metrics"]["train/kl_cur_ref_nats"] == pytest.approx(0, abs=1e-7)
    assert watch[-1]["metrics"]["train/kl_cur_ref_nats"] > 1e-4
    assert not any("logp_ref" in row.columns for step in watch for row in step["batch"].rows)      # no pass for what nobody reads
    learner = watch[0]["learner"]
    row = watch[-1]["batch"].rows[0]
    batch = collate([row], [0], device="cpu")
    with torch.no_grad():
        got = score(learner.session.state.policy, batch, learner.session.settings.sampling, needs=(),
                    against=learner.parts[""].objective.against)["divergence"][batch.mask_BT]
        torch.testing.assert_close(got, by_hand(learner.session.state, learner.reference, row, 0.8), rtol=1e-4, atol=1e-6)


def test_a_target_moves_the_coefficient_of_the_exact_kl(tmp_path, watch):
    kl = {"coef": 0.1, "estimator": "exact", "target_nats": 100.0, "horizon_rollouts": 50}
    Trainer(tiny({**RUN, "algo.kl": kl}), out=tmp_path / "run").run()
    coefs = [step["metrics"]["train/kl_coef"] for step in watch]
    assert coefs == pytest.approx([0.1 * (1 - 0.2 * 16 / 50) ** i for i in range(4)])
    shares = [step["metrics"]["train/loss_kl"] / step["metrics"]["train/kl_cur_ref_nats"] for step in watch[1:]]
    assert shares == pytest.approx(coefs[1:], rel=1e-3)
