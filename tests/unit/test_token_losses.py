"""Supervised losses per token, and divergences from a teacher."""

from __future__ import annotations

import math

import pytest
import torch

from burnish.algorithms.divergences import forward_kl, generalized_jsd, mixture_logprob, reverse_kl
from burnish.algorithms.token_losses import cross_entropy, dft

close = torch.testing.assert_close


def logits(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


A, B = logits(0, 3, 4, 7), logits(1, 3, 4, 7)
DIVERGENCES = {
    "forward": lambda c, t, temperature=1.0: forward_kl(c, t, temperature=temperature),
    "reverse": lambda c, t, temperature=1.0: reverse_kl(c, t, temperature=temperature),
    **{f"jsd {b}": lambda c, t, temperature=1.0, b=b: generalized_jsd(c, t, beta=b, temperature=temperature) for b in (0.0, 0.1, 0.5, 1.0)},
}


def test_gradient_of_dft_is_that_of_cross_entropy_times_p():
    logp = torch.tensor([[0.0, -0.5, -3.0, -200.0]], requires_grad=True)
    plain = torch.autograd.grad(cross_entropy(logp).sum(), logp)[0]
    close(torch.autograd.grad(dft(logp).sum(), logp)[0], plain * logp.exp().detach())
    close(dft(logp), -logp.exp() * logp)
    assert dft(torch.tensor([-math.log(2)])).item() == pytest.approx(math.log(2) / 2)


def test_kl_by_hand():
    """p = (3/4, 1/4), q = (1/2, 1/2)"""
    p, q = torch.tensor([math.log(3), 0.0]), torch.tensor([5.0, 5.0])
    pq, qp = 0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert reverse_kl(p, q, temperature=1.0).item() == pytest.approx(pq)
    assert forward_kl(p, q, temperature=1.0).item() == pytest.approx(qp)
    m = (0.625, 0.375)
    jsd = 0.5 * (0.75 * math.log(0.75 / m[0]) + 0.25 * math.log(0.25 / m[1]) + 0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1]))
    assert generalized_jsd(p, q, beta=0.5, temperature=1.0).item() == pytest.approx(jsd)


def test_swapped_arguments():
    close(reverse_kl(A, B, temperature=0.7), forward_kl(B, A, temperature=0.7))
    for beta in (0.0, 0.2, 0.5, 1.0):
        close(generalized_jsd(A, B, beta=beta, temperature=1.3), generalized_jsd(B, A, beta=1 - beta, temperature=1.3))


def test_the_ends_of_beta_are_the_kls_and_next_to_them_is_beta_times_the_kl():
    close(generalized_jsd(A, B, beta=0, temperature=1.0), forward_kl(A, B, temperature=1.0))
    close(generalized_jsd(A, B, beta=1, temperature=1.0), reverse_kl(A, B, temperature=1.0))
    close(generalized_jsd(A, B, beta=1e-6, temperature=1.0) / 1e-6, forward_kl(A, B, temperature=1.0), rtol=1e-4, atol=0.0)
    close(generalized_jsd(A, B, beta=1 - 1e-6, temperature=1.0) / 1e-6, reverse_kl(A, B, temperature=1.0), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_zero_and_flat_where_both_are_equal(name):
    cur = A.clone().requires_grad_()
    value = DIVERGENCES[name](cur, A + 3.0)      # a constant changes no softmax
    close(value, torch.zeros(3, 4, dtype=torch.float64), rtol=0, atol=1e-14)
    close(torch.autograd.grad(value.sum(), cur)[0], torch.zeros_like(A), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_teacher_has_no_gradient_and_the_policys_is_right(name):
    cur, teach = A[0, :2].clone().requires_grad_(), B[0, :2].clone().requires_grad_()
    torch.autograd.gradcheck(lambda c: DIVERGENCES[name](c, teach, 0.8), cur)
    assert torch.autograd.grad(DIVERGENCES[name](cur, teach).sum(), (cur, teach), allow_unused=True)[1] is None


@pytest.mark.parametrize("name", DIVERGENCES)
def test_temperature_divides_both(name):
    close(DIVERGENCES[name](A, B, 2.5), DIVERGENCES[name](A / 2.5, B / 2.5))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_far_apart_logits_stay_finite(name):
    cur = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 3e5]], requires_grad=True)
    teach = torch.tensor([[-1e4, 0.0, 1e4], [0.0, 3e5, 0.0]])
    value = DIVERGENCES[name](cur, teach)
    assert bool(value.isfinite().all()) and bool((value > 0).all())
    assert bool(torch.autograd.grad(value.sum(), cur)[0].isfinite().all())


def test_the_jsd_of_distributions_apart_is_the_entropy_of_beta():
    far = torch.tensor([100.0, 0.0]), torch.tensor([0.0, 100.0])
    assert generalized_jsd(*far, beta=0.5, temperature=1.0).item() == pytest.approx(math.log(2))
    entropy = -0.1 * math.log(0.1) - 0.9 * math.log(0.9)
    assert generalized_jsd(*far, beta=0.1, temperature=1.0).item() == pytest.approx(entropy)


def test_what_makes_no_sense():
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            forward_kl(A, B, temperature=temperature)
    for beta in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="beta"):
            generalized_jsd(A, B, beta=beta, temperature=1.0)


def test_several_teachers():
    logp = torch.tensor([[[-1.0, -2.0]], [[-3.0, -6.0]]])
    close(mixture_logprob(logp, weights=[3, 1]), torch.tensor([[-1.5, -3.0]]))
    close(mixture_logprob(logp[:1], weights=[0.2]), logp[0])
    with pytest.raises(ValueError, match="1 weights for 2"):
        mixture_logprob(logp, weights=[1.0])
