"""Rewards by trained models: whole answers and steps, one model and several, texts that cannot be scored, and what is refused at start."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from tiny import tiny
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from burnish.config import Model, Reward, Scratch
from burnish.config.errors import SettingsError
from burnish.models.export import export
from burnish.models.heads import name_pad_token
from burnish.models.load import load, load_scorer
from burnish.plan.preflight import check
from burnish.ref import Ref, RefError
from burnish.rewards.model_scores import _batches, _ends, learned
from burnish.rewards.pool import Reading, RewardPool
from burnish.types import Rollout, Task, Turn

CONFIG = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
ALPHABET = "0123456789 .>abc"
TEXTS = ["12", "", "9 8 7", "abc", "3", "a bb cc c"]


def reward_model(folder, *, seed: int = 0, outputs: int = 1, alphabet: str = ALPHABET):
    loaded = load_scorer(Model(scratch=Scratch(alphabet=alphabet, config=CONFIG)), seed=seed, outputs=outputs)
    name_pad_token(loaded.module, loaded.tokenizer, end_token_ids=[1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.nn.init.normal_(loaded.module.score.weight)
    export(loaded.module, loaded.tokenizer, folder, end_token_ids=[1], stop=())
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    paths = {
        "one": reward_model(root / "one"), "two": reward_model(root / "two", seed=1, alphabet=ALPHABET[::-1]),
        "three": reward_model(root / "three", seed=2), "several": reward_model(root / "several", outputs=3),
        "steps": reward_model(root / "steps", outputs=2, seed=4),
    }
    causal = load(Model(scratch=Scratch(alphabet=ALPHABET, config=CONFIG)), seed=0)
    export(causal.module, causal.tokenizer, root / "causal", end_token_ids=[1], stop=())
    return paths | {"causal": str(root / "causal")}


def rollout(text: str, *, sample: int = 0, prompt: str = "4 >", between: str | None = None) -> Rollout:
    """The policy's tokens say nothing to the reward model, which reads the text alone."""
    parts = [("prompt", prompt), ("policy", text)] + ([("env", between), ("policy", text)] if between is not None else [])
    turns = tuple(Turn(author, i, i + 1, part) for i, (author, part) in enumerate(parts))
    tokens = tuple(900 + i for i in range(len(parts)))
    sampled = tuple(author == "policy" for author, _ in parts)
    return Rollout(Task("t", prompt), sample, tokens, sampled, (0.0,) * len(parts), turns, "end_token", 0)


def made(*paths: str, **values) -> learned:
    reward = learned(paths=list(paths), **values)
    reward.load()
    return reward


@torch.no_grad()
def plain(path: str, *texts: str) -> torch.Tensor:
    """Scores of prompt and answer by plain transformers, one by one. [N,K]"""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForSequenceClassification.from_pretrained(path)
    ids = [tokenizer(f"4 >{text}{tokenizer.eos_token}", return_tensors="pt").input_ids for text in texts]
    return torch.cat([model(one, attention_mask=torch.ones_like(one)).logits for one in ids]).double()


@pytest.mark.parametrize("tokens_per_batch", [1, 24, 16384])
def test_the_score_is_that_of_plain_transformers_in_any_batch(models, tokens_per_batch):
    got = made(models["one"], tokens_per_batch=tokens_per_batch)([rollout(text) for text in TEXTS])
    assert got == pytest.approx(plain(models["one"], *TEXTS)[:, 0].tolist(), abs=1e-5)
    assert len(set(got)) == len(TEXTS)


def test_members_with_vocabularies_of_their_own_are_combined(models):
    three = [models[name] for name in ("one", "two", "three")]
    each = torch.stack([plain(path, *TEXTS)[:, 0] for path in three])
    rollouts = [rollout(text) for text in TEXTS]
    for combine, expected in (
        ("mean", each.mean(0)), ("minimum", each.amin(0)),
        ({"ref": "mean_minus_variance", "coef": 0.5}, each.mean(0) - 0.5 * each.var(0, correction=0)),
        ({"ref": "weighted_mean", "weights": [1.0, 2.0, 1.0]}, (each[0] + 2 * each[1] + each[2]) / 4),
    ):
        assert made(*three, combine=combine)(rollouts) == pytest.approx(expected.tolist(), abs=1e-5)
    assert made(three[0], three[0], combine={"ref": "mean_minus_std", "coef": 9.0})(rollouts) == pytest.approx(each[0].tolist(), abs=1e-5)


def test_outputs_are_weighed(models):
    got = made(models["several"], weights=[1.0, 0.0, -2.0])([rollout(text) for text in TEXTS])
    each = plain(models["several"], *TEXTS)
    assert got == pytest.approx((each[:, 0] - 2 * each[:, 2]).tolist(), abs=1e-5)


def test_a_text_that_cannot_be_read_has_a_reason_and_the_others_their_score(models):
    rollouts = [rollout("12"), rollout("x"), rollout("1" * 40), rollout("9<end>")]
    with RewardPool([Reward(fn=Ref("learned", {"paths": [models["one"]]}), isolate=False)]) as pool:
        found = pool.score(rollouts)
    assert found[0].reward == pytest.approx(float(plain(models["one"], "12")), abs=1e-5)
    assert [s.reward for s in found[1:]] == [None] * 3
    assert "no token for ['x']" in found[1].errors["learned"]
    assert "the text has 44 tokens, more than the 32 of the reward model's context" in found[2].errors["learned"]
    assert "no token for ['<'" in found[3].errors["learned"], "a policy that writes the end token's name does not end its turn"


def test_all_that_was_written_after_the_prompt_is_read(models):
    got = made(models["one"])([rollout("12", between=" 3 > ")])
    assert got == pytest.approx(plain(models["one"], "12 3 > 12")[:, 0].tolist(), abs=1e-5)


def test_in_a_worker_the_scores_are_the_same(models):
    rollouts = [rollout(text, sample=i) for i, text in enumerate(TEXTS[:3])]
    both = []
    for isolate in (True, False):
        with RewardPool([Reward(fn=Ref("learned", {"paths": [models["one"]]}), isolate=isolate, timeout_s=60)]) as pool:
            both.append([s.reward for s in pool.score(rollouts)])
    assert both[0] == pytest.approx(both[1], abs=1e-5)


def test_bfloat16_rounds_the_weights_and_not_the_positions(models):
    one = made(models["one"], dtype="bfloat16")
    module = one.members[0].scorer.module
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in module.buffers() if b.is_floating_point()} == {torch.float32}
    assert one([rollout("12")]) == pytest.approx(plain(models["one"], "12")[0].tolist(), abs=0.2)


# steps

@torch.no_grad()
def plain_steps(path: str, pieces: list[str]) -> list[float]:
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForSequenceClassification.from_pretrained(path)
    out = []
    for n in range(1, len(pieces) + 1):
        ids = tokenizer("4 >" + "".join(pieces[:n]), return_tensors="pt").input_ids
        out.append(float(model(ids, attention_mask=torch.ones_like(ids)).logits.softmax(-1)[0, 1]))
    return out


def test_each_step_is_scored_where_it_ends(models):
    reward = made(models["steps"], steps=r"\.")
    (steps, one_step) = reward([rollout("1 2.3.a"), rollout("7")])
    assert [end for end, _ in steps] == [4, 6, 7]
    assert [value for _, value in steps] == pytest.approx(plain_steps(models["steps"], ["1 2.", "3.", "a"]), abs=1e-5)
    assert one_step == [(1, pytest.approx(plain_steps(models["steps"], ["7"])[0], abs=1e-5))]
    with RewardPool([Reward(fn=Ref("learned", {"paths": [models["steps"]], "steps": "[.]"}), isolate=False)]) as pool:
        scored = pool.score([rollout("12."), rollout("")], Reading(lambda tokens: ""))
    assert scored[0].steps == ((1, scored[0].reward),)
    assert "wrote nothing, so there is no step to score" in scored[1].errors["learned"]
    assert isinstance(reward([rollout("1.", between="2")])[0], ValueError)


def test_ends_of_steps():
    line, char = re.compile("\n"), re.compile(".")
    assert _ends("a\nb\n", line) == [2, 4]
    assert _ends("a\n\n \nb", line) == [5, 6], "blank steps belong to the one before"
    assert _ends("\n\na\nb", line) == [4, 5], "and at the start to the next"
    assert _ends("ab", char) == [1, 2]
    assert _ends("  ", line) == [2]
    assert _ends("", line) == []


def test_batches_hold_the_budget_and_the_longest_come_first():
    lengths = dict(enumerate([3, 9, 1, 4, 9, 2]))
    found = _batches(lengths, 18)
    assert found[0] == [1, 4]
    assert sorted(i for index in found for i in index) == list(range(6))
    assert all(len(index) * max(lengths[i] for i in index) <= 18 for index in found)


# what is refused at start

@pytest.mark.parametrize(("values", "message"), [
    ({"paths": []}, r"paths is \[\]; it is a list of the folders"),
    ({"paths": "one"}, "paths is 'one'; it is a list of the folders"),
    ({"paths": ["causal"]}, "holds a model without a head of scores; give the folder `model` of a run of loop reward_model"),
    ({"paths": ["several"]}, "gives 3 numbers; say with `weights` what each counts"),
    ({"paths": ["one", "several"], "weights": [1.0, 1.0, 1.0]}, "weights has 3 numbers, and .*one gives 1"),
    ({"paths": ["one"], "steps": "\n"}, "gives one number; a model that judges steps gives one a class"),
    ({"paths": ["steps"], "steps": "("}, "no regular expression"),
    ({"paths": ["steps"], "steps": ".", "weights": [1.0, 1.0]}, "remove one of weights and steps"),
    ({"paths": ["one"], "combine": "means"}, "did you mean 'mean'"),
    ({"paths": ["one"], "combine": "mean_minus_std"}, r"needs \['coef'\]"),
    ({"paths": ["one"], "combine": {"ref": "weighted_mean", "weights": [1.0, 2.0]}}, "2 weights for 1 members"),
    ({"paths": ["one"], "dtype": "float16"}, "dtype"),
    ({"paths": ["./nowhere/model"]}, "there is no 'nowhere'"),
    ({"paths": ["runs/reward-model-tiny/model"]}, "it is what a run leaves, so make it first: burnish train reward-model-tiny"),
])
def test_what_cannot_work_is_refused_before_any_weight_is_loaded(models, values, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = values["paths"] if isinstance(values["paths"], str) else [models.get(p, p) for p in values["paths"]]
    settings = tiny({"rewards": [{"fn": {"ref": "learned", **values, "paths": paths}, "isolate": False}]})
    with pytest.raises(SettingsError, match=f"(?s)rewards.0.fn: learned: .*{message}"):
        check(settings)


def test_a_damaged_model_is_told_when_the_run_begins(models, tmp_path):
    shutil.copytree(models["one"], tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(RefError, match="ends too early or is damaged"):
        RewardPool([Reward(fn=Ref("learned", {"paths": [str(tmp_path / "broken")]}), isolate=False)])


def test_two_learned_rewards_need_names(models):
    fn = {"ref": "learned", "paths": [models["one"]]}
    with pytest.raises(ValueError, match=r"the same reward stands twice.*give one of them a name"):
        tiny({"rewards": [{"fn": fn}, {"fn": fn, "cost": True}]})
    tiny({"rewards": [{"fn": fn, "name": "helpful"}, {"fn": fn, "name": "harmful", "cost": True}], "constraint": {"limit": 0.0}})
