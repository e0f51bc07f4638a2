"""Intervals and tests against numbers worked out by hand, tables, and full enumeration."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.evaluate.measure import interval, mcnemar, mean_pass_at_k, paired, pass_at_k, sign_flip, t_quantile, wilson


@pytest.mark.parametrize(("successes", "n", "low", "high"), [
    # (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), z^2 = 3.841459, by hand
    (5, 10, 0.236593, 0.763407),
    (0, 10, 0.0, 0.277533),
    (10, 10, 0.722467, 1.0),
    (1, 1, 1 / 4.841459, 1.0),
])
def test_wilson_by_hand(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=2e-6)


@pytest.mark.parametrize(("successes", "n", "low", "high"), [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (1, 29, 0.0061, 0.1718)])
def test_wilson_of_the_literature(successes, n, low, high):
    """Newcombe, Statistics in Medicine 17 (1998), 857-872, Table I, method 3."""
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_of_an_interval_with_missing_values():
    found = interval([1, 0, None, True, 0.0, None, 1.0, 1, 0, 0, 0, 1])
    assert (found.mean, found.num_items, found.num_missing, found.method) == (0.5, 10, 2, "wilson")
    assert (found.low, found.high) == pytest.approx((0.236593, 0.763407), abs=2e-6)


@pytest.mark.parametrize(("p", "df", "t"), [
    (0.975, 1, 12.7062047), (0.975, 2, 4.3026527), (0.975, 9, 2.2621572), (0.975, 30, 2.0422725), (0.995, 5, 4.0321430),
    (0.95, 10, 1.8124611), (0.975, 120, 1.9799304), (0.975, 1_000_000, 1.9599664),
])
def test_t_quantile_of_the_table(p, df, t):
    assert t_quantile(p, df) == pytest.approx(t, rel=2e-7)


def test_t_interval():
    # mean 2.5, variance 5/3, half width 3.1824463 sqrt(5/12)
    found = interval([1.0, 2.0, None, 3.0, 4.0])
    half = 3.1824463 * math.sqrt(5 / 12)
    assert (found.mean, found.low, found.high) == pytest.approx((2.5, 2.5 - half, 2.5 + half), rel=1e-7)
    assert (found.method, found.num_items, found.num_missing) == ("t", 4, 1)


def test_one_number_has_no_spread():
    assert interval([0.3]).low is None and interval([0.3]).high is None
    assert interval([1.0]).low == pytest.approx(1 / 4.841459, abs=1e-6)


@pytest.mark.parametrize(("won", "lost", "p"), [
    (9, 1, 2 * 11 / 1024), (1, 9, 22 / 1024), (0, 0, 1.0), (5, 0, 2 / 32), (3, 3, 1.0), (10, 2, 2 * (1 + 12 + 66) / 4096), (1, 0, 1.0),
])
def test_mcnemar(won, lost, p):
    assert mcnemar(won, lost) == pytest.approx(p, rel=1e-12)


def test_paired_shares():
    # 10 wrong then right, 2 right then wrong, 5 right twice, 3 wrong twice; two pairs that one side did not measure
    before = [0] * 10 + [1] * 2 + [1] * 5 + [0] * 3 + [None, 1]
    after = [1] * 10 + [0] * 2 + [1] * 5 + [0] * 3 + [1, None]
    found = paired(before, after)
    assert (found.difference, found.num_items, found.num_missing, found.method) == (pytest.approx(0.4), 20, 2, "mcnemar exact")
    assert found.p == pytest.approx(158 / 4096, rel=1e-12)
    # Bonett and Price: (11 - 3)/22 +- 1.959964 sqrt((14/22 - (8/22)^2) / 22)
    half = 1.959964 * math.sqrt((14 / 22 - (8 / 22) ** 2) / 22)
    assert (found.low, found.high) == pytest.approx((8 / 22 - half, 8 / 22 + half), abs=1e-6)


def test_paired_shares_at_the_edges():
    same = paired([0, 1, 1], [0, 1, 1])
    assert (same.difference, same.p) == (0.0, 1.0) and same.low == -same.high
    all_won = paired([0] * 40, [1] * 40)
    assert all_won.difference == all_won.high == 1.0 and all_won.p == pytest.approx(2 / 2**40)


def test_paired_means_by_enumeration():
    before, after = [0.2, 0.5, 0.1, 0.9, None], [0.3, 0.7, 0.4, 0.9, 0.5]
    found = paired(before, after)
    # differences 0.1, 0.2, 0.3, 0: of the 8 sign patterns of the first three only +++ and --- reach |0.6|
    assert (found.difference, found.p, found.method) == (pytest.approx(0.15), 2 / 8, "sign-flip exact")
    assert (found.num_items, found.num_missing) == (4, 1)
    half = 3.1824463 * math.sqrt((0.1**2 + 0.2**2 + 0.3**2 - 4 * 0.15**2) / 3 / 4)
    assert (found.low, found.high) == pytest.approx((0.15 - half, 0.15 + half), rel=1e-6)


def test_sign_flip_counts_ties_of_sums_that_differ_by_rounding():
    # 0.1 + 0.2 - 0.3 is 5.6e-17 in floats and 0 on paper: every pattern reaches it
    assert sign_flip([0.1, 0.2, -0.3], seed=0) == (1.0, "sign-flip exact")


def test_sign_flip_equals_mcnemar_where_both_apply():
    assert sign_flip([1.0] * 9 + [-1.0], seed=0)[0] == pytest.approx(mcnemar(9, 1), rel=1e-12)


def test_drawn_sign_flip_is_near_the_exact_one_and_repeats():
    draw = random.Random(1)
    values = [draw.gauss(0.35, 1) for _ in range(16)]
    total = abs(sum(values))
    patterns = itertools.product((1, -1), repeat=16)
    exact = sum(abs(sum(s * v for s, v in zip(signs, values, strict=True))) >= total - 1e-9 for signs in patterns) / 2**16
    p, method = sign_flip(values, seed=7)
    assert method == "sign-flip drawn" and (p, method) == sign_flip(values, seed=7)
    assert abs(p - exact) < 4 * math.sqrt(exact * (1 - exact) / 9999) + 1e-4
    assert p != sign_flip(values, seed=8)[0]


def test_drawn_p_is_never_zero():
    assert sign_flip([1.0 + 0.01 * i for i in range(60)], seed=0)[0] == 1 / 10_000


def test_drawn_p_is_uniform_where_nothing_changed():
    """At level 0.1 about a tenth of the tests of pure noise reject."""
    draw = random.Random(3)
    rejected = sum(sign_flip([draw.gauss(0, 1) for _ in range(9)], seed=0)[0] <= 0.1 for _ in range(300))
    assert 15 <= rejected <= 48


@pytest.mark.parametrize(("n", "c", "k", "value"), [
    (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 1 - 1 / 6), (10, 3, 5, 1 - 21 / 252), (5, 5, 2, 1.0), (5, 0, 5, 0.0), (3, 1, 3, 1.0),
])
def test_pass_at_k(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, rel=1e-12)


def test_pass_at_k_is_the_share_of_subsets():
    outcomes = [1, 0, 0, 1, 0, 0, 1]
    subsets = list(itertools.combinations(outcomes, 3))
    assert pass_at_k(7, 3, 3) == pytest.approx(sum(map(any, subsets)) / len(subsets), rel=1e-12)


def test_mean_pass_at_k_leaves_out_what_was_not_scored():
    found = mean_pass_at_k([[1.0, 0.0, None], [0.0, 0.0, 0.0], [None, None, 1.0]], 2)
    assert (found.mean, found.num_items, found.num_missing) == (0.5, 2, 1)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: interval([]), "nothing was measured"),
    (lambda: interval([None, None]), "nothing was measured"),
    (lambda: interval([float("nan")]), "finite"),
    (lambda: interval([1.0], level=95), "level is 95"),
    (lambda: paired([1], [1, 0]), "1 values before, 2 after"),
    (lambda: paired([1, None], [None, 1]), "nothing was measured"),
    (lambda: pass_at_k(4, 5, 1), "5 of 4"),
    (lambda: pass_at_k(4, 1, 5), "k is 5"),
    (lambda: pass_at_k(4, 1, 0), "k is 0"),
])
def test_what_cannot_be_measured_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_needs_no_torch():
    code = "import sys, burnish.evaluate.measure; assert not {'torch', 'numpy', 'scipy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
