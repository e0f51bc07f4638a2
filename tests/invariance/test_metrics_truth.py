"""T21: a pooled metric equals the value computed by hand over everything, however the step was split, down to the last bit."""

import json
import math
import pickle
import random

import pytest

from burnish.monitor.metrics import METRICS, Pool
from burnish.monitor.writer import MetricsWriter, read_metrics

# (log-ratio, weight of the token) of seven sampled tokens; ranks and micro-batches of unequal size
VALUES = [0.5, -1.25, 3.0, 0.125, 2.0, -0.75, 1.5]


@pytest.mark.parametrize("split", [[7], [1, 6], [3, 4], [2, 2, 3], [1] * 7])
def test_a_mean_is_the_mean_over_all_tokens(split):
    pool, begin = Pool(), 0
    for size in split:
        part = VALUES[begin : begin + size]
        pool.add("train/kl_cur_gen_nats", sum(part), len(part))
        begin += size
    assert pool.rows() == {"train/kl_cur_gen_nats": sum(VALUES) / 7}


def test_two_unequal_ranks_merge_into_the_pooled_value():
    a, b = Pool(), Pool()
    a.add("train/entropy_nats", 0.5 - 1.25, 2)           # rank 0: two tokens
    b.add("train/entropy_nats", 3.0 + 0.125 + 2.0, 3)    # rank 1: five tokens in two micro-batches
    b.add("train/entropy_nats", -0.75 + 1.5, 2)
    for pool, tokens, norm, lr in ((a, 2, 0.5, 1e-5), (b, 5, 2.0, 2e-5)):
        pool.add("train/tokens_count", tokens)
        pool.add("train/grad_norm", norm)
        pool.add("train/lr", lr)
    b = pickle.loads(pickle.dumps(b))                    # as it travels between processes
    a.merge(b)
    assert a.rows() == {
        "train/entropy_nats": sum(VALUES) / 7,           # not the mean of the two means, which is another number:
        "train/tokens_count": 7.0, "train/grad_norm": 2.0, "train/lr": 2e-5,
    }
    assert sum(VALUES) / 7 != ((0.5 - 1.25) / 2 + (3.0 + 0.125 + 2.0 - 0.75 + 1.5) / 5) / 2


def test_any_split_and_any_order_give_the_same_bits():
    rng = random.Random(0)
    values = [rng.gauss(0, 1) * 10 ** rng.randint(-12, 12) for _ in range(400)]
    found = set()
    for trial in range(20):
        rng.shuffle(values)
        pools = [Pool() for _ in range(1 + trial % 5)]
        for value in values:
            rng.choice(pools).add("train/loss", value)
        for pool in pools[1:]:
            pools[0].merge(pool)
        found.add(pools[0].rows()["train/loss"])
    assert found == {math.fsum(values) / 400}


def test_a_mean_of_nothing_is_absent_and_never_zero():
    pool = Pool()
    pool.add("rollout/reward_mean", 0.0, 0)
    assert pool.rows() == {}


def test_rates_pool_as_tokens_over_seconds():
    pool = Pool()
    pool.add("rate/generate_tokens_per_s", 100, 1.0)
    pool.add("rate/generate_tokens_per_s", 100, 4.0)
    assert pool.rows() == {"rate/generate_tokens_per_s": 40.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_stays_visible(tmp_path, bad):
    """A NaN in one micro-batch must not become a number by the others, and must not enter the file as one."""
    pool, other = Pool(), Pool()
    pool.add("train/loss", 1.0)
    other.add("train/loss", bad)
    other.add("train/entropy_nats", 2.0)
    pool.merge(other)
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, pool.rows())
    assert read_metrics(tmp_path) == [{"step": 1, "train/entropy_nats": 2.0, "not_finite": ["train/loss"]}]
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)


def test_every_metric_is_declared_once_with_a_unit_in_its_name():
    units = {"frac": "frac", "nats": "nats", "tokens": "tokens", "s": "s", "count": "count", "tokens/s": "tokens_per_s", "GiB": "gib"}
    for name, declared in METRICS.items():
        assert name == declared.name and declared.meaning
        if declared.unit:
            assert units[declared.unit] in name, name
