"""The critic, as a head and as a model: T1, T2, T3, T4 of its values; what GAE makes of them; warm-up, early stop, export, resume."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import TINY, tiny_settings
from parts import CLIP, GRPO, PLAIN, assert_same_gradients, gradients, on_policy, random_rows, state_of, weights_of
from safetensors.torch import load_file
from tiny import tiny, whole_and_resumed
from transformers import AutoModelForCausalLM

from burnish.algorithms import corrections
from burnish.algorithms.advantages import gae, whiten
from burnish.algorithms.reduce import rollout_mean, token_mean
from burnish.algorithms.value_losses import clipped_error
from burnish.api import Trainer
from burnish.api.policy_gradient import PolicyGradient
from burnish.models.heads import Scorer, add_value_head
from burnish.models.load import load, load_scorer
from burnish.rollout import KlReward, assemble
from burnish.trainer import Algorithm, Correction, ValueObjective, ValueTerm, make_state, train_step, values_of
from burnish.trainer.columns import score_rows
from burnish.types import Batch, Group, Rollout, Row, Scored, Task

LOSS = partial(clipped_error, clip=0.2)
KINDS = ("model", "head")
SIZED = {"sampling": PLAIN, "tokens_per_micro_batch": 10_000}
ONE = {"sampling": PLAIN, "lr_of": lambda u: 1e-2, "clip_norm": 1.0}

both_kinds = pytest.mark.parametrize("kind", KINDS)


def critic(kind, make_tiny, name="llama"):
    """A state with values that are not 0, and the objective that trains them."""
    if kind == "model":
        state = make_state(load_scorer(tiny_settings(name), seed=0).module, kind=Scorer)
        head, objective = state.policy.head, ValueObjective(LOSS, rollout_mean)
    else:
        loaded = make_tiny(name)
        head, objective = add_value_head(loaded.module), Algorithm(CLIP, rollout_mean, value=ValueTerm(LOSS, 0.5))
        state = state_of(loaded)
    with torch.no_grad():
        head.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
    return state, objective


def rows_of(state, num=6, *, seed=0):
    """Rows with returns, and values of the start that the clip holds on to."""
    rows = [r.put(ret=math.sin(i)) for i, r in enumerate(random_rows(num, seed=seed))]
    values = score_rows(state.policy, rows, column="value_cur", **SIZED)
    return [r.put(value_prox=tuple(v + 0.3 * (-1) ** i for v in value)) for i, (r, value) in enumerate(zip(rows, values, strict=True))]


@both_kinds
@pytest.mark.parametrize("minibatches", [1, 3])
def test_any_split_gives_the_same_gradient_and_metrics(make_tiny, kind, minibatches):
    state, objective = critic(kind, make_tiny)
    batch = Batch(tuple(rows_of(state, 7)))
    whole, metrics = gradients(state, batch, objective, minibatches=minibatches, tokens_per_micro_batch=100_000)
    assert metrics["train/value_error"] > 0.1
    for tokens in (1, 60):
        split, split_metrics = gradients(state, batch, objective, minibatches=minibatches, tokens_per_micro_batch=tokens)
        assert_same_gradients(split, whole)
        assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@both_kinds
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_what_stands_where_nothing_was_sampled_changes_nothing(make_tiny, kind, poison):
    state, objective = critic(kind, make_tiny)
    rows = rows_of(state)
    put = lambda row, values: tuple(v if m else poison for v, m in zip(values, row.mask, strict=True))  # noqa: E731
    dirty = [replace(row, columns={n: put(row, values) for n, values in row.columns.items()}) for row in rows]
    clean, clean_metrics = gradients(state, Batch(tuple(rows)), objective, tokens_per_micro_batch=50)
    other, other_metrics = gradients(state, Batch(tuple(dirty)), objective, tokens_per_micro_batch=50)
    assert all(torch.equal(clean[0][n], other[0][n]) for n in clean[0])
    assert clean_metrics == other_metrics


@both_kinds
def test_lr_zero_stays_where_it_is_and_the_clip_does_nothing(make_tiny, kind):
    state, objective = critic(kind, make_tiny)
    before = weights_of(state)
    rows = [r.put(ret=0.5) for r in on_policy(state, random_rows(5)).rows] if kind == "head" else [r.put(ret=0.5) for r in random_rows(5)]
    values = score_rows(state.policy, rows, column="value_cur", **SIZED)
    batch = Batch(tuple(r.put(value_prox=v) for r, v in zip(rows, values, strict=True)))
    want = [(v - 0.5) ** 2 for value, r in zip(values, rows, strict=True) for v, m in zip(value, r.mask, strict=True) if m]
    for _ in range(5):
        metrics = train_step(state, batch, objective, sampling=PLAIN, lr_of=lambda u: 0.0, clip_norm=1.0, epochs=2, minibatches=2)
        assert metrics["train/value_error"] == pytest.approx(sum(want) / len(want), rel=1e-4)
    assert all(torch.equal(before[n], m) for n, m in state.weights.masters.items())


def rollout(tokens, sampled, *, stop="end_token", sample=0):
    task = Task("t", "p")
    return Rollout(task, sample, tuple(tokens), tuple(sampled), tuple(-1.0 if s else 0.0 for s in sampled), (), stop, 0)


def rollouts_of(rows):
    return [rollout(r.tokens, r.mask, stop=("end_token", "max_tokens", "context")[i % 3], sample=i) for i, r in enumerate(rows)]


@both_kinds
@pytest.mark.parametrize("name", TINY)
def test_a_rollout_has_the_same_values_alone_and_with_others(make_tiny, kind, name):
    state, _ = critic(kind, make_tiny, name)
    rollouts = rollouts_of(random_rows(6))
    together = values_of(state.policy, rollouts, **SIZED)
    alone = [values_of(state.policy, [r], sampling=PLAIN, tokens_per_micro_batch=1) for r in rollouts]
    for i, (values, ends) in enumerate(alone):
        assert values[0] == pytest.approx(together[0][i], abs=5e-5)
        assert ends[0] == pytest.approx(together[1][i], abs=5e-5)
        assert max(map(abs, values[0])) > 0.01
        assert (ends[0] != 0) == rollouts[i].truncated


@both_kinds
def test_the_value_after_a_rollout_is_the_one_before_a_further_token(make_tiny, kind):
    state, _ = critic(kind, make_tiny)
    rollouts = [replace(r, stop="max_tokens") for r in rollouts_of(random_rows(3))]
    _, ends = values_of(state.policy, rollouts, **SIZED)
    assert values_of(state.policy, rollouts, bootstrap=False, **SIZED)[1] == [0, 0, 0]
    longer = [Row((*r.tokens, 7), (False,) * len(r.tokens) + (True,)) for r in rollouts]
    assert [v[-1] for v in score_rows(state.policy, longer, column="value_cur", **SIZED)] == pytest.approx(ends, abs=1e-5)


# what becomes of values

T, F = True, False
WHOLE = rollout([1, 2, 3, 4, 5, 6, 7], [F, F, T, T, F, F, T])               # an environment's turn in the middle
CUT = rollout([1, 2, 3, 4], [F, F, T, T], stop="max_tokens", sample=1)
VALUE = [(9.0, 9.0, 0.5, 0.2, 9.0, 9.0, 0.4), (9.0, 9.0, 0.1, 0.3)]
# gamma 0.9, lambda 0.5. Whole, reward 1: d = 0.9*0.2-0.5, 0.9*0.4-0.2, 1-0.4; cut off, reward 0: d = 0.9*0.3-0.1, 0.9*0.8-0.3
ADV = [(0, 0, -0.1265, 0.43, 0, 0, 0.6), (0, 0, 0.359, 0.42)]
RET = [(0, 0, 0.3735, 0.63, 0, 0, 1.0), (0, 0, 0.459, 0.72)]


def assembled(**values):
    groups = [Group(WHOLE.task, (Scored(WHOLE, 1.0, {}), Scored(CUT, 0.0, {})))]
    return assemble(groups, **{"advantage": partial(gae, gamma=0.9, lam=0.5), "value": VALUE, "bootstrap": [0.0, 0.8], **values})


def column(batch, name):
    return [pytest.approx(row.columns[name], abs=1e-9) for row in batch.rows]


def test_gae_over_a_batch_by_hand():
    batch = assembled()
    assert column(batch, "adv") == ADV and column(batch, "ret") == RET
    assert [r.columns["value_prox"] for r in batch.rows] == VALUE
    assert batch.rows[0].mask == WHOLE.sampled


def test_returns_are_not_whitened():
    batch = assembled(normalize=whiten)
    assert column(batch, "ret") == RET
    flat = torch.tensor([a for row in batch.rows for a, m in zip(row.columns["adv"], row.mask, strict=True) if m], dtype=torch.float64)
    assert float(flat.mean()) == pytest.approx(0, abs=1e-6) and float(flat.std()) == pytest.approx(1, abs=1e-6)
    assert flat.argsort().tolist() == torch.tensor([-0.1265, 0.43, 0.6, 0.359, 0.42]).argsort().tolist()


def test_a_kl_in_the_rewards_of_tokens_is_part_of_the_returns():
    ref = [tuple(x - 0.5 if s else 7.0 for x, s in zip(r.logp_gen, r.sampled, strict=True)) for r in (WHOLE, CUT)]
    batch = assembled(logp_ref=ref, kl=KlReward("k1", 0.1, per_token=True), advantage=partial(gae, gamma=1.0, lam=1.0))
    # each token costs 0.05: with gamma = lambda = 1 a return is the rest of the rewards, and the value after a cut
    want = [(0, 0, 0.85, 0.9, 0, 0, 0.95), (0, 0, 0.7, 0.75)]
    assert column(batch, "ret") == want


def test_rollouts_that_were_cut_off_can_be_left_out_after_their_values_were_used():
    batch = assembled(normalize=whiten, drop_truncated=True)
    both = assembled(normalize=whiten)
    assert len(batch.rows) == 1 and batch.rows[0].columns == both.rows[0].columns


# the proximal log-probs are kept by the first pass

def forwards(state, rows, algo, **values):
    calls = []
    handle = state.policy.body.register_forward_hook(lambda *_: calls.append(1))
    try:
        train_step(state, Batch(tuple(rows)), algo, tokens_per_micro_batch=1, **ONE, **values)
    finally:
        handle.remove()
    return len(calls)


MISMATCH = Correction(partial(corrections.token_truncate, high=2.0))


@pytest.mark.parametrize(("algo", "epochs", "minibatches", "passes"), [
    (replace(GRPO, correction=MISMATCH), 1, 1, 1), (replace(GRPO, correction=MISMATCH), 4, 1, 4),
    (replace(GRPO, correction=MISMATCH), 2, 3, 3), (replace(GRPO, correction=MISMATCH, prox="interpolated"), 2, 3, 2),
    (replace(GRPO, prox="gen"), 2, 3, 2), (replace(GRPO, correction=replace(MISMATCH, normalize=True)), 2, 1, 3),
], ids=["one", "epochs", "minibatches", "interpolated", "gen", "looks ahead"])
def test_how_often_the_model_is_run(make_tiny, algo, epochs, minibatches, passes):
    """With one update a pass the first pass gives logp_prox; only updates that follow another in the first pass need one before."""
    state = state_of(make_tiny("llama"))
    assert forwards(state, random_rows(6), algo, epochs=epochs, minibatches=minibatches) == 6 * passes


@pytest.mark.parametrize("tokens", [1, 60, 10_000])
def test_the_log_probs_of_the_first_pass_are_those_of_a_pass_of_their_own(make_tiny, tokens):
    seen = []

    def loss(logp_cur, logp_prox, adv, mask):
        seen.append((logp_prox.clone(), mask.clone()))
        return CLIP(logp_cur, logp_prox, adv)

    state = state_of(make_tiny("llama"))
    rows = random_rows(6)
    own = score_rows(state.policy, rows, sampling=PLAIN, tokens_per_micro_batch=tokens)
    train_step(state, Batch(tuple(rows)), Algorithm(loss, token_mean), epochs=3, tokens_per_micro_batch=tokens, **ONE)
    want = sorted(v for value, r in zip(own, rows, strict=True) for v, m in zip(value, r.mask, strict=True) if m)
    each = len(seen) // 3
    for epoch in range(3):
        got = sorted(float(v) for prox, mask in seen[epoch * each : (epoch + 1) * each] for v in prox[mask])
        assert got == pytest.approx(want, abs=1e-6)


# early stop

def test_a_step_stops_where_the_policy_is_too_far_and_keeps_the_schedule(make_tiny):
    rows = on_policy(state_of(make_tiny("llama")), random_rows(6))
    asked = []
    lr_of = lambda u: asked.append(u) or 1e-3 / u  # noqa: E731
    step = {"batch": rows, "algo": GRPO, "sampling": PLAIN, "lr_of": lr_of, "clip_norm": 1.0}
    # the distance that each of six updates finds, which the clip does not reach
    kls = [train_step(state_of(make_tiny("llama")), epochs=n, **step)["train/kl_cur_prox_nats"] for n in range(1, 7)]
    assert kls[0] == 0 and kls == sorted(set(kls))
    asked.clear()
    stopped = state_of(make_tiny("llama"))
    metrics = train_step(stopped, epochs=6, stop_at_kl_nats=(kls[2] + kls[3]) / 2, **step)
    assert (stopped.updates, stopped.version) == (6, 3)
    assert metrics["train/stopped_updates_count"] == 3
    assert metrics["train/lr"] == 1e-3 / 3 and asked == [1, 2, 3]
    assert metrics["train/kl_cur_prox_nats"] == pytest.approx(kls[3], rel=1e-5)
    again = state_of(make_tiny("llama"))
    train_step(again, epochs=3, **step)
    assert all(torch.equal(m, stopped.weights.masters[n]) for n, m in again.weights.masters.items())
    assert all(m.grad is None for m in stopped.weights.masters.values())
    asked.clear()
    train_step(stopped, **step)
    assert asked == [7]


@pytest.mark.parametrize(("epochs", "minibatches", "made"), [(4, 2, 2), (3, 3, 1)])
def test_nothing_is_looked_at_after_a_stop(make_tiny, epochs, minibatches, made):
    state, calls, asked = state_of(make_tiny("llama")), [], []
    batch = on_policy(state, random_rows(6))
    state.policy.body.register_forward_hook(lambda *_: calls.append(1))
    lr_of = lambda u: asked.append(u) or (1e-9 if u < made else 1e-2)  # noqa: E731
    metrics = train_step(
        state, batch, GRPO, sampling=PLAIN, lr_of=lr_of, clip_norm=1.0, epochs=epochs, minibatches=minibatches, tokens_per_micro_batch=1,
        stop_at_kl_nats=1e-6,
    )
    assert (asked, state.updates) == (list(range(1, made + 1)), epochs * minibatches)
    assert metrics["train/stopped_updates_count"] == epochs * minibatches - made
    assert len(calls) == 6 + (made + 1) * 6 // minibatches          # logp_prox, the updates that were made, the one that was left out


def test_a_stop_without_a_distance_is_refused(make_tiny):
    from burnish.algorithms.policy_losses import reinforce

    state = state_of(make_tiny("llama"))
    with pytest.raises(ValueError, match="stop_at_kl_nats"):
        train_step(state, Batch(tuple(random_rows(3))), Algorithm(reinforce, token_mean), stop_at_kl_nats=0.1, **ONE)


# whole runs

GAE = {
    "algo.advantage": {"ref": "gae", "gamma": 1.0, "lam": 0.95}, "algo.normalize": "whiten", "tasks.held_out": 0, "evaluate.every_steps": 0,
    "train.steps": 4, "optim.warmup_updates": 0,
}
CRITIC = {"model": {"kind": "model", "lr": 1e-2}, "head": {"kind": "head"}}


@pytest.fixture
def watch(monkeypatch):
    """What each step's updates changed: names of the policy's and of the critic's weights, the metrics, the learner."""
    steps = []
    update = PolicyGradient.update

    def watched(self, batch):
        states = self.session.states
        before = {name: weights_of(state) for name, state in states.items()}
        metrics = update(self, batch)
        changed = {name: {n for n, m in s.weights.masters.items() if not torch.equal(m, before[name][n])} for name, s in states.items()}
        steps.append({"changed": changed, "metrics": metrics, "learner": self, "batch": batch})
        return metrics

    monkeypatch.setattr(PolicyGradient, "update", watched)
    return steps


def value_head_of(names):
    return {n for n in names if "value_head" in n}


@both_kinds
def test_a_warm_up_trains_only_the_critic(tmp_path, watch, kind):
    kl = {"coef": 0.1, "target_nats": 5.0, "horizon_rollouts": 100}
    changes = {**GAE, "critic": {**CRITIC[kind], "warmup_steps": 2}, "algo.kl": kl, "train.epochs": 2, "optim.weight_decay": 0.1}
    Trainer(tiny(changes), out=tmp_path / "run").run()
    names = watch[0]["learner"].session.state.weights.masters.keys()
    for step in watch[:2]:
        if kind == "head":
            assert step["changed"]["policy"] == value_head_of(names) != set()
            assert step["metrics"]["train/loss"] == pytest.approx(step["metrics"]["train/value_error"] / 4, rel=1e-3)
        else:
            assert step["changed"]["policy"] == set() != step["changed"]["critic"]
            assert step["metrics"]["train/critic_loss"] > 0
        assert step["metrics"]["train/kl_coef"] == 0.1
    for step in watch[2:]:
        assert step["changed"]["policy"] - value_head_of(names)
        assert step["metrics"]["train/loss_policy"] is not None
    assert watch[2]["metrics"]["train/kl_coef"] == 0.1 > watch[3]["metrics"]["train/kl_coef"]
    state = watch[0]["learner"].session.state
    assert state.updates == 8 and state.version == (8 if kind == "head" else 4)


def test_a_separate_critic_begins_with_the_policys_body_and_goes_on_where_the_policy_stops(tmp_path, watch):
    stop = {"algo.stop_at_kl_nats": 1e-9, "train.epochs": 3, "train.steps": 2, "optim.lr": 1e-2}
    Trainer(tiny({**GAE, "critic": CRITIC["model"], **stop}), out=tmp_path / "run").run()
    assert [step["metrics"]["train/stopped_updates_count"] for step in watch] == [2, 2]
    learner = watch[0]["learner"]
    assert (learner.session.state.version, learner.critic_state.version) == (2, 6)
    assert learner.session.state.updates == learner.critic_state.updates == 6
    assert learner.critic_state.step == 1             # the step that its minibatches were drawn for
    policy = dict(load(tiny_settings("llama"), seed=0).module.named_parameters())
    own = dict(load_scorer(tiny_settings("llama"), seed=0).module.named_parameters())
    assert len(policy.keys() & own.keys()) > 15 and all(torch.equal(own[n], policy[n]) for n in policy.keys() & own.keys())


@both_kinds
@pytest.mark.parametrize("bootstrap", [False, True])
def test_the_values_of_the_rows_are_those_of_the_critic_before_the_update(tmp_path, watch, kind, bootstrap):
    Trainer(tiny({**GAE, "critic": {**CRITIC[kind], "bootstrap": bootstrap}, "train.steps": 2}), out=tmp_path / "run").run()
    first = watch[0]["batch"].rows
    assert all(v == 0 for row in first for v in row.columns["value_prox"])                 # the head is 0 at first
    assert any(v != 0 for row in watch[1]["batch"].rows for v in row.columns["value_prox"])
    for row in first:          # gamma 1 and no value yet: what a token's return is made of is the reward alone
        rets = [r for r, m in zip(row.columns["ret"], row.mask, strict=True) if m]
        assert rets == pytest.approx([row.numbers["reward"] * 0.95**k for k in reversed(range(len(rets)))])
    later = watch[1]["batch"].rows
    after = [[r for r, m in zip(row.columns["ret"], row.mask, strict=True) if m][-1] - row.numbers["reward"] for row in later]
    assert max(map(abs, after)) > 1e-3 if bootstrap else after == pytest.approx([0] * len(after))


@both_kinds
def test_the_finished_model_has_no_value_head_and_loads_in_transformers(tmp_path, watch, kind):
    finished = Trainer(tiny({**GAE, "critic": CRITIC[kind]}), out=tmp_path / "run").run()
    state = load_file(finished.model / "model.safetensors")
    assert not [n for n in state if "value" in n or "score" in n]
    model, info = AutoModelForCausalLM.from_pretrained(finished.model, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    token_BT = torch.tensor([[3, 4, 5, 6]])
    policy = watch[-1]["learner"].session.state.policy
    with torch.no_grad():
        torch.testing.assert_close(model(token_BT).logits, policy.logits(policy.hidden(token_BT)))


@both_kinds
def test_stopped_and_resumed_is_the_same_to_the_last_bit(tmp_path, kind):
    changes = {
        **GAE, "critic": {**CRITIC[kind], "warmup_steps": 1}, "train.epochs": 2, "train.minibatches": 2, "train.steps": 6,
        "algo.stop_at_kl_nats": 0.05, "algo.kl": {"coef": 0.1, "place": "token_reward", "estimator": "k1", "target_nats": 0.5},
    }
    whole, resumed = whole_and_resumed(tmp_path, changes, stop_in_step=5)
    assert whole == resumed
    assert any("critic-adam" in name for name in whole["sums"]) == (kind == "model")


def test_a_critic_of_another_model_computes_as_that_model_says(tmp_path, watch):
    model = tiny().model.model_dump(mode="json")
    model["dtype"] = "bfloat16"
    model["scratch"]["config"]["num_hidden_layers"] = 1
    Trainer(tiny({**GAE, "critic": {"lr": 1e-2, "model": model}, "train.steps": 2}), out=tmp_path / "run").run()
    learner = watch[0]["learner"]
    assert {p.dtype for p in learner.critic_state.policy.module.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in learner.session.state.policy.module.parameters()} == {torch.float32}
    assert watch[0]["changed"]["critic"]


def test_a_critic_with_other_tokens_is_refused(tmp_path):
    model = tiny().model.model_dump(mode="json")
    model["scratch"]["alphabet"] = "1023456789>"
    with pytest.raises(ValueError, match=r"critic\.model: its tokens are not those of the policy"):
        Trainer(tiny({**GAE, "critic": {"lr": 1e-2, "model": model}}), out=tmp_path / "run").run()


@both_kinds
@pytest.mark.parametrize("how", [{"model.lora": {"rank": 4}}, {"model.dtype": "bfloat16"}], ids=["lora", "bfloat16"])
def test_the_critic_learns_beside_an_adapter_and_in_bfloat16(tmp_path, watch, kind, how):
    Trainer(tiny({**GAE, **how, "critic": CRITIC[kind], "train.steps": 2, "train.epochs": 2}), out=tmp_path / "run").run()
    learner = watch[0]["learner"]
    for step in watch:
        heads = step["changed"].get("critic") or value_head_of(step["changed"]["policy"])
        assert {n for n in heads if "value_head" in n or "score" in n}
        assert 0 <= step["metrics"]["train/value_error"] < math.inf
        assert step["changed"]["policy"] - value_head_of(step["changed"]["policy"])
    if "model.lora" in how:
        trained = set(learner.session.state.weights.masters) | set(learner.critic_state.weights.masters if learner.critic_state else ())
        assert {n for n in trained if "lora_" not in n} == {n for n in trained if "value_head" in n or "score" in n}
