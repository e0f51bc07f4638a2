"""T5 what is trained is what was sampled, over turns and filters; T10 rewards reach their own rollout; failures stay in their episode."""

from __future__ import annotations

import asyncio

import pytest
import torch
from parts import adv_of, engine_of

from burnish.algorithms.advantages import center, leave_one_out, reward_itself, standardize
from burnish.chat.template import encode_prompt, encode_reply
from burnish.config import Reward, Sampling
from burnish.engines import Abilities, Completion
from burnish.envs import Reply, single_turn
from burnish.ref import Ref
from burnish.rewards.pool import RewardPool
from burnish.rollout import KlReward, Visit, assemble, keep, run_group, run_groups, summarize
from burnish.trainer.columns import collate, micro_batches
from burnish.types import Group, Rollout, Scored, Task

SAMPLING = Sampling(max_new_tokens=6, stop=("\n",))


class Scorer:
    """Scores in this process."""

    def __init__(self, fn=lambda r: float(len(r.text))):
        self.fn = fn

    def score(self, rollouts):
        return [Scored(r, self.fn(r), {"score": self.fn(r)}) for r in rollouts]


class EchoEngine:
    """Writes back the last number of its prompt, one token a character, and an end token."""

    abilities = Abilities(logprobs=True, shares_weights=False)

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def generate(self, requests, sampling, *, progress=None):
        done = []
        for r in requests:
            text = self.tokenizer.decode(list(r.tokens)).rstrip("=").split(" ")[-1]
            tokens = (*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id)
            done.append(Completion(tokens, tuple(-0.1 * i for i in range(len(tokens))), text, "end_token", 3))
        return done

    def load(self, version): ...

    def close(self): ...


class Twice:
    """Asks again, once, and ends."""

    def __init__(self):
        self.turn = 0

    def start(self, task):
        return task.prompt

    async def step(self, text):
        self.turn += 1
        return Reply(done=True) if self.turn == 2 else Reply(f" no {text[:2]}. again=")


def parts(loaded, **changes):
    return {
        "engine": engine_of(loaded), "tokenizer": loaded.tokenizer, "env": single_turn, "scorer": Scorer(), "sampling": SAMPLING,
        "samples_per_prompt": 4, "seed": 0, **changes,
    }


def tasks(n=6):
    return [Task(f"t{i}", f"say {i * 37}=", str(i * 37)) for i in range(n)]


def test_every_token_has_one_author_and_the_turns_tile_the_rollout(tiny_llama):
    for group in run_groups([Visit(t) for t in tasks()], **parts(tiny_llama, env=Twice)):
        for item in group.scored:
            r = item.rollout
            assert [t.author for t in r.turns] == ["prompt", "policy", "env", "policy"]
            assert [t.start for t in r.turns] == [0, *(t.end for t in r.turns[:-1])]
            assert r.turns[-1].end == len(r.tokens)
            for turn in r.turns:
                assert all(s == (turn.author == "policy") for s in r.sampled[turn.start : turn.end])
            assert list(r.tokens[: r.turns[0].end]) == encode_prompt(tiny_llama.tokenizer, group.task.prompt)
            reply = r.turns[2]
            assert list(r.tokens[reply.start : reply.end]) == encode_reply(tiny_llama.tokenizer, reply.text)
            assert all((lp < 0) == s for lp, s in zip(r.logp_gen, r.sampled, strict=True))


def test_what_the_engine_wrote_reaches_the_trainer_untouched(tiny_llama):
    """Through turns, scoring, keeping, assembling and collating: the very ids and log-probs of the completions."""
    written = []
    engine = engine_of(tiny_llama)
    generate = engine.generate
    engine.generate = lambda requests, sampling, **k: (lambda out: (written.extend(out), out)[1])(generate(requests, sampling, **k))
    groups = run_groups([Visit(t) for t in tasks()], **parts(tiny_llama, engine=engine, env=Twice))
    batch = assemble(keep(groups).groups, advantage=standardize)
    sampled = sorted(
        tuple((t, lp) for t, lp, s in zip(r.tokens, r.columns["logp_gen"], r.mask, strict=True) if s) for r in batch.rows
    )
    half = len(written) // 2
    expected = sorted(
        tuple(zip(a.tokens + b.tokens, a.logp_gen + b.logp_gen, strict=True)) for a, b in zip(written[:half], written[half:], strict=True)
    )
    assert sampled == expected
    device = torch.device("cpu")
    for index in micro_batches(batch.rows, tokens_per_micro_batch=50):
        micro = collate(batch.rows, index, device=device)
        for b, i in enumerate(index):
            row = batch.rows[i]
            assert micro.token_BT[b, micro.mask_BT[b]].tolist() == [t for t, s in zip(row.tokens, row.mask, strict=True) if s]
            assert not micro.mask_BT[b, len(row.tokens) :].any()


def test_the_end_token_is_trained(tiny_llama):
    (group,) = run_groups([Visit(tasks()[0])], **parts(tiny_llama, engine=EchoEngine(tiny_llama.tokenizer)))
    for item in group.scored:
        assert item.rollout.tokens[-1] == tiny_llama.tokenizer.eos_token_id
        assert item.rollout.sampled[-1]


@pytest.mark.parametrize("samples", [1, 3])
def test_each_reward_belongs_to_its_own_rollout(tiny_llama, samples, tmp_path):
    """An echo: the completion repeats its prompt, and the reward checks that it was given the task of that completion."""
    (tmp_path / "echo.py").write_text(
        "def score(rollout, task):\n"
        "    assert rollout.text == task.answer, (rollout.text, task.answer)\n"
        "    assert rollout.task.id == task.id\n"
        "    return float(task.answer)\n"
    )
    visits = [Visit(t) for t in tasks(20)]
    with RewardPool([Reward(fn=Ref(f"{tmp_path / 'echo.py'}:score"))]) as pool:
        given = parts(tiny_llama, engine=EchoEngine(tiny_llama.tokenizer), scorer=pool, samples_per_prompt=samples)
        groups = run_groups(visits, **given)
        backwards = run_groups(visits[::-1], **given)
    for visit, group in zip(visits, groups, strict=True):
        assert group.task == visit.task
        assert [s.errors for s in group.scored] == [{}] * samples
        assert [s.reward for s in group.scored] == [float(visit.task.answer)] * samples
    assert backwards[::-1] == groups


def test_the_same_rollouts_alone_together_and_in_any_order(tiny_llama):
    together = run_groups([Visit(t) for t in tasks()], **parts(tiny_llama))
    alone = [run_group(t, **parts(tiny_llama)) for t in tasks()]
    backwards = run_groups([Visit(t) for t in tasks()[::-1]], **parts(tiny_llama, engine=engine_of(tiny_llama, slots=3)))[::-1]
    assert together == alone == backwards


def test_seed_task_visit_and_sample_each_give_other_random_numbers(tiny_llama):
    def texts(**changes):
        visit = changes.pop("visit", Visit(tasks()[1]))
        return [s.rollout.text for s in run_groups([visit], **parts(tiny_llama, **changes))[0].scored]

    base = texts()
    assert len(set(base)) > 1
    assert base == texts()
    assert base != texts(seed=1)
    assert base != texts(visit=Visit(tasks()[1], times_before=1))
    assert base != texts(purpose="evaluate")
    assert texts(samples_per_prompt=2) == base[:2]


def test_a_failing_episode_is_not_scored_and_the_others_go_on(tiny_llama):
    class Fails(single_turn):
        def start(self, task):
            self.task = task
            if task.id == "t1":
                raise KeyError("no such level")
            return task.prompt

        async def step(self, text):
            if self.task.id == "t2":
                raise RuntimeError("crashed")
            if self.task.id == "t3":
                await asyncio.sleep(60)
            return Reply(done=True)

    groups = run_groups([Visit(t) for t in tasks(5)], **parts(tiny_llama, env=Fails, env_timeout_s=0.2))
    stops = [None, "error:start: KeyError", "error:env: RuntimeError: crashed", "error:env: no reply within 0.2 s", None]
    for group, stop in zip(groups, stops, strict=True):
        for item in group.scored:
            assert (item.reward is None) == (stop is not None)
            if stop:
                assert item.rollout.stop.startswith(stop)
                assert item.errors["rollout"].startswith(stop)
    kept = keep(groups)
    assert kept.dropped == {"not_scored": 12}
    assert [g.task.id for g in kept.groups] == ["t0", "t4"]
    metrics = summarize(groups, kept, success_reward=1.0)
    assert metrics["rollout/not_scored_count"] == 12


def rollout_with(reward, n, task):
    return Scored(Rollout(task, n, (5, 6), (False, True), (0.0, -1.0), (), "max_tokens", 0), reward, {})


def group_with(*rewards):
    task = Task("t", "p")
    return Group(task, tuple(rollout_with(r, n, task) for n, r in enumerate(rewards)))


def test_a_missing_reward_is_left_out_of_the_baseline():
    kept = keep([group_with(1.0, None, 0.0, 2.0)])
    batch = assemble(kept.groups, advantage=center)
    assert [adv_of(row) for row in batch.rows] == [0.0, -1.0, 1.0]
    assert (batch.num_tokens, batch.num_rollouts) == (3, 3)


def test_constant_groups_are_kept_or_dropped_by_choice():
    groups = [group_with(1.0, 1.0), group_with(0.0, 1.0), group_with(None, 1.0), group_with(None, None)]
    assert len(keep(groups).groups) == 3
    kept = keep(groups, constant_groups="drop")
    assert len(kept.groups) == 1
    assert kept.dropped == {"not_scored": 3, "constant_group": 3}


def test_a_kl_penalty_comes_before_the_baseline():
    group = group_with(1.0, 0.0)
    gen = group.scored[0].rollout.logp_gen[-1]
    ref = [(0.0, gen - 0.25), (0.0, gen)]
    batch = assemble([group], advantage=leave_one_out, kl=KlReward("k1", 1.0), logp_ref=ref)
    assert [adv_of(row) for row in batch.rows] == pytest.approx([0.75, -0.75])
    assert [row.numbers["reward"] for row in batch.rows] == [1.0, 0.0]
    assert batch.rows[1].columns["logp_ref"] == ref[1]
    with pytest.raises(ValueError, match="logp_ref has 3 entries for 2 rollouts"):
        assemble([group], advantage=center, kl=KlReward("k1", 1.0), logp_ref=[*ref, ref[0]])


def test_advantages_by_hand():
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    assert standardize(reward, eps=0.0).tolist() == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254])
    assert leave_one_out(reward).tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert center(reward).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert reward_itself(reward).tolist() == reward.tolist()
    for fn in (standardize, leave_one_out, center):
        assert fn.needs_group
        assert fn(torch.full((7,), 0.7)).tolist() == [0.0] * 7
        assert fn(torch.tensor([3.0])).tolist() == [0.0]


def test_rollouts_refuse_lists_of_unequal_length():
    with pytest.raises(ValueError, match="equally long"):
        Rollout(Task("t", "p"), 0, (1, 2), (True,), (0.0, 0.0), (), "env", 0)




def test_an_environment_keeps_its_connection_between_turns(tiny_llama):
    class Connected(Twice):
        async def step(self, text):
            if self.turn == 0:
                self.lock = asyncio.Lock()
                self.future = asyncio.get_running_loop().create_future()
                asyncio.get_running_loop().call_soon(self.future.set_result, 1)
            async with self.lock:
                await self.future
            return await super().step(text)

    async def inside_a_loop():
        return run_groups([Visit(t) for t in tasks(2)], **parts(tiny_llama, env=Connected))

    for groups in (run_groups([Visit(t) for t in tasks(2)], **parts(tiny_llama, env=Connected)), asyncio.run(inside_a_loop())):
        assert all(len(s.rollout.turns) == 4 and s.reward is not None for g in groups for s in g.scored)


def test_an_environment_that_cannot_be_made_fails_its_own_episode(tiny_llama):
    made = []

    def sometimes():
        made.append(1)
        if len(made) == 2:
            raise OSError("no server")
        return single_turn()

    (group,) = run_groups([Visit(tasks()[0])], **parts(tiny_llama, env=sometimes))
    assert [s.rollout.stop.startswith("error:start: OSError: no server") for s in group.scored] == [False, True, False, False]


def test_a_reply_that_fills_the_context_ends_the_episode_and_it_is_scored(make_tiny):
    class Talkative(single_turn):
        async def step(self, text):
            return Reply("x" * 40)

    loaded = make_tiny("llama", max_position_embeddings=40)
    (group,) = run_groups([Visit(tasks()[0])], **parts(loaded, env=Talkative))
    for item in group.scored:
        assert item.rollout.stop == "context"
        assert [t.author for t in item.rollout.turns] == ["prompt", "policy", "env"]
        assert item.reward == float(len(item.rollout.text))
