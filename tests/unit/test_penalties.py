"""KL and entropy over the vocabulary, far drift, and the two controllers."""

from __future__ import annotations

import math

import pytest
import torch

from burnish.algorithms import penalties as p

INF = math.inf


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_exact_kl_is_what_sampling_would_give_on_average():
    cur, ref = normal(0, 2, 3, 7), normal(1, 2, 3, 7)
    logp, logp_ref = cur.log_softmax(-1), ref.log_softmax(-1)
    got = p.exact_kl(cur, ref)
    assert got.shape == (2, 3) and (got > 0).all()
    torch.testing.assert_close(got, (logp.exp() * p.k1(logp, logp_ref)).sum(-1))
    torch.testing.assert_close(got, (logp.exp() * p.k3(logp, logp_ref)).sum(-1))
    torch.testing.assert_close(p.exact_kl(cur + 5, ref - 3), got)


def test_exact_kl_by_hand():
    """p = (3/4, 1/4), q = (1/2, 1/2): 3/4 log 3/2 + 1/4 log 1/2."""
    cur, ref = torch.tensor([3.0, 1.0]).log(), torch.zeros(2)
    assert float(p.exact_kl(cur, ref)) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-5)
    assert float(p.exact_kl(cur, cur)) == 0


def with_gradient(fn, *logits):
    logits = [torch.tensor(x, requires_grad=True) for x in logits]
    value = fn(*logits)
    return value.item(), torch.cat(torch.autograd.grad(value, logits))


@pytest.mark.parametrize(("cur", "ref", "kl"), [
    ([0.0, 0.0, -INF], [0.0, 0.0, -INF], 0),
    ([0.0, 0.0, -INF], [0.0, 0.0, 0.0], math.log(1.5)),
    ([0.0, -900.0, 0.0], [0.0, -INF, 0.0], 0),
    ([900.0, 0.0, -900.0], [-900.0, 0.0, 900.0], 1800),
])
def test_tokens_without_a_chance(cur, ref, kl):
    value, grads = with_gradient(p.exact_kl, cur, ref)
    assert value == pytest.approx(kl, abs=1e-6) and grads.isfinite().all()


def test_a_token_that_the_reference_rules_out():
    assert float(p.exact_kl(torch.zeros(3), torch.tensor([0.0, 0.0, -INF]))) == INF


@pytest.mark.parametrize(("logits", "nats"), [
    ([0.0, 0.0, 0.0, 0.0], math.log(4)), ([5.0, 5.0, -INF, 5.0], math.log(3)), ([900.0, 0.0, -900.0, 0.0], 0), ([-INF, 2.0, -INF, -INF], 0),
])
def test_entropy(logits, nats):
    value, grads = with_gradient(p.entropy, logits)
    assert value == pytest.approx(nats, abs=1e-6) and grads.isfinite().all()


def test_entropy_has_its_gradient():
    """dH/dz_v = -p_v (log p_v + H)."""
    z = normal(2, 5).requires_grad_()
    entropy, logp = p.entropy(z), z.log_softmax(-1)
    torch.testing.assert_close(torch.autograd.grad(entropy, z)[0], -(logp.exp() * (logp + entropy)).detach())


@pytest.mark.parametrize("estimator", p.ESTIMATORS)
def test_at_the_reference_a_kl_loss_is_nothing(estimator):
    logp = normal(3, 2, 4).requires_grad_()
    for gradient_of in ("straight_through_k2", "importance_weighted", "naive"):
        loss = p.kl_loss(logp, logp.detach(), logp.detach(), estimator=estimator, gradient=gradient_of)
        grad = torch.autograd.grad(loss.sum(), logp)[0]
        assert (loss == 0).all() and (grad == (1 if estimator == "k1" and gradient_of != "straight_through_k2" else 0)).all()


def test_far_from_the_reference_the_gradient_still_pulls():
    logp = torch.tensor([50.0], requires_grad=True)
    for estimator, slope in (("k2", 50.0), ("k3", 1.0)):
        loss = p.kl_loss(logp, logp.detach(), torch.zeros(1), estimator=estimator, gradient="naive")
        assert torch.autograd.grad(loss.sum(), logp)[0].tolist() == [slope]
    far = torch.tensor([-3000.1], requires_grad=True)
    loss = p.kl_loss(far, far.detach(), torch.zeros(1), estimator="k1", gradient="straight_through_k2")
    assert loss.tolist() == far.tolist() and torch.autograd.grad(loss.sum(), far)[0].tolist() == far.tolist()


def test_an_unknown_gradient():
    with pytest.raises(ValueError, match="straight_through_k2"):
        p.kl_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), estimator="k1", gradient="unbiased")


def test_entropy_controller_by_hand():
    control = p.EntropyController(coef=0.0, target_nats=0.2, step=0.01, max_coef=0.025)
    low, met, high = 0.1, 0.2, 0.3
    seen = [
        (low, 0.0, 0.01), (low, 0.01, 0.02), (low, 0.02, 0.025), (met, 0.025, 0.025),
        (high, 0.0, 0.015), (high, 0.0, 0.005), (high, 0.0, 0.0), (low, 0.0, 0.01),
    ]
    for entropy, active, after in seen:
        assert control.update(entropy) == pytest.approx(active)
        assert control.coef == pytest.approx(after)


def test_kl_controller_moves_by_a_fifth_at_most():
    control = p.KlController(coef=1.0, target_nats=2.0, horizon_rollouts=100)
    assert control.update(1000.0, 100) == pytest.approx(1.2)
    assert control.update(0.0, 50) == pytest.approx(1.2 * 0.9)
    assert control.update(2.0, 100) == pytest.approx(1.2 * 0.9)
