import re
import sys

import pytest

from burnish.config.errors import SettingsError
from burnish.config.load import load_recipe
from burnish.plan.preflight import check, examine

RECIPE = """\
name: tiny
model:
  scratch:
    alphabet: "0123456789> "
    config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2,
             max_position_embeddings: 32}
tasks:
  source: {ref: copy_digits, length: 2}
  held_out: 20
rewards:
  - fn: exact
sampling: {max_new_tokens: 8}
evaluate: {sampling: {max_new_tokens: 8}}
train: {steps: 10, prompts_per_step: 4, samples_per_prompt: 4}
monitor: {sinks: []}
"""

PARTS = '''\
from burnish.types import Task

def reward(rollout, task): return 1.0
def no_such_arguments(completion, answer): return 1.0
def exact(rollout, task): return 1.0

def loss(logp_cur, adv): return -logp_cur * adv
def loss_of_the_reference(logp_cur, logp_ref): return logp_cur - logp_ref
def loss_of_something_else(logp_cur, values): return logp_cur
def loss_without_gradient(logp_gen, adv): return logp_gen * adv
def loss_of_the_sampler(logp_cur, logp_gen, adv): return (logp_cur - logp_gen).exp() * adv
def loss_of_values(logp_cur, value_cur): return logp_cur * value_cur
def loss_of_teachers(logp_cur, logp_teach): return logp_cur - logp_teach
def loss_of_scores(logp_cur, score_cur): return logp_cur * score_cur
def of_the_step(reward, groups): return reward
def of_four(reward):
    assert len(reward) == 4, "called with made-up numbers"
    return reward
def one_argument(loss): return loss.sum()
def two_arguments(reward, eps): return reward
def by_place_only(reward, /): return reward

class NoStep:
    def start(self, task): return task.prompt

class NeedsSize:
    def __init__(self, size): ...
    def start(self, task): ...
    async def step(self, text): ...

class Failing:
    def __init__(self): raise RuntimeError("the server is down")

def empty(): return []
def not_tasks(): return ["1>", "2>"]
def a_number(): return 3
def raising(): return 1 / 0
def few(): return [Task(str(i), f"{i % 10}>", str(i)) for i in range(30)]
def letters(): return [Task("a", "abc", "x")] + [Task(str(i), f"{i}>", str(i)) for i in range(50)]
def long(): return [Task("l", "1" * 30, "x")] + few() + [Task("m", "2>" , "2")]
def chat(): return [Task(str(i), ({"role": "user", "content": str(i)},), i) for i in range(50)]
def many(): return [Task(str(i), f"{i}>", str(i)) for i in range(3000)] + [Task("l", "9" * 30, "x")]
'''


@pytest.fixture
def look(tmp_path, monkeypatch):
    """look(*sets) checks the tiny recipe after these changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "my_parts.py").write_text(PARTS)
    yield lambda *sets: check(load_recipe("tiny.yaml", sets=sets, note=lambda line: None))
    sys.modules.pop("my_parts", None)


def refusals(look, *sets) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        look(*sets)
    return caught.value.problems


def test_a_recipe_that_works(look):
    assert look() == []
    found = examine(load_recipe("tiny.yaml"))
    assert len(found.tasks[""].train) == 80 and len(found.tasks[""].held_out) == 20 and found.model.context_tokens == 32
    assert (found.num_train, found.num_held_out, found.held_out_tasks) == (80, 20, 20)
    assert found.facts[1:] == [
        "method   standardize, ppo_clip, token_mean",
        "tasks    80 to train on, 20 held out",
        "run      10 steps of 4 prompts x 4 samples, 10 updates, 0.5 passes over the tasks",
    ]


@pytest.mark.parametrize("sets", [
    ["algo.loss=my_parts.py:loss"], ["rewards.0.fn=my_parts:reward"], ["rewards.1.fn=my_parts.py:reward"],
    ["tasks.source=my_parts.py:few", "tasks.held_out=6"],
    ["algo.loss=my_parts.py:loss_of_the_reference", "algo.kl.coef=0"], ["algo.advantage=reward_itself", "train.samples_per_prompt=1"],
    ["algo.reduce={ref: rollout_sum_over, length: 8}"], ["monitor.sinks=[tensorboard]"],
    ["algo.advantage=my_parts.py:of_four"],
])
def test_changes_that_work(look, sets):
    look(*sets)


@pytest.mark.parametrize(("sets", "told"), [
    ("rewards.0.fn=no_module:f", "rewards.0.fn: cannot import no_module:f: ModuleNotFoundError"),
    ("rewards.0.fn=my_parts.py:rewrd", "rewards.0.fn: my_parts.py:rewrd: my_parts.py has no 'rewrd'; did you mean 'reward'?"),
    ("rewards.0.fn=exactt", "rewards.0.fn: exactt: burnish.rewards has no 'exactt'; did you mean 'exact'?"),
    ("rewards.0.fn={ref: exact, strip: 1}", "rewards.0.fn: exact takes no ['strip']"),
    ("rewards.0.fn=my_parts.py:no_such_arguments", "rewards.0.fn: my_parts.py:no_such_arguments needs ['completion', 'answer']"),
    ("rewards.1.fn=my_parts.py:exact", "rewards.1.fn: rewards.0 is called exact too"),
    ("rewards.0.weight=0", "rewards: every weight is 0"),
    ("algo.loss=ppo_clip", "algo.loss: ppo_clip needs ['eps_low', 'eps_high']"),
    ("algo.loss=my_parts.py:loss_of_something_else", "needs ['values'], which neither the recipe nor this place provides. A loss may ask"),
    ("algo.loss=my_parts.py:loss_of_the_reference", "asks for logp_ref, which is there only with algo.kl; add algo.kl.coef=0"),
    ("algo.loss=my_parts.py:loss_without_gradient", "takes neither logp_cur nor entropy, so it has no gradient"),
    ("algo.reduce=my_parts.py:one_argument", "is called with loss, mask, num_tokens, num_rollouts, which it does not take"),
    ("algo.reduce=rollout_sum_over", "algo.reduce: rollout_sum_over needs ['length']"),
    ("algo.advantage=my_parts.py:two_arguments", "algo.advantage: my_parts.py:two_arguments needs ['eps']"),
    ("env=my_parts.py:NoStep", "env: my_parts.py:NoStep has no step; an environment is a class with start(task) and async step(text)"),
    ("env=my_parts.py:NeedsSize", "env: my_parts.py:NeedsSize needs ['size']"),
    ("monitor.sinks.0=tensorbord", "monitor.sinks.0: tensorbord: burnish.monitor.sinks has no 'tensorbord'; did you mean 'tensorboard'?"),
    ("monitor.sinks.0=my_parts.py:Failing", "monitor.sinks.0: my_parts.py:Failing raised RuntimeError: the server is down"),
    ("monitor.sinks.0=trackio", "monitor.sinks.0: the sink trackio needs a library that is not installed: pip install burnish[trackio]"),
    ("train.samples_per_prompt=1", "train.samples_per_prompt is 1, and algo.advantage standardize compares the samples of one prompt:"),
    ("sampling.top_k=1", "sampling.top_k is 1, which draws the same sample each time"),
    ("tasks.source=nowhere", "tasks.source: nowhere: burnish.data.sources has no 'nowhere'"),
    ("tasks.source.lenght=3", "tasks.source: copy_digits takes no ['lenght']"),
    ("tasks.source.length=0", "tasks.source: length is 0"),
    ("tasks.source=my_parts.py:empty", "tasks: the task source returned no tasks"),
    ("tasks.source=my_parts.py:not_tasks", "tasks: item 0 of the task source is a str"),
    ("tasks.source=my_parts.py:a_number", "my_parts.py:a_number returned a int; a source returns a list of burnish.types.Task"),
    ("tasks.source=my_parts.py:raising", "tasks.source: my_parts.py:raising raised ZeroDivisionError: division by zero"),
    ("tasks.held_out=100", "tasks: held_out is 100, but the source has 100 distinct prompts"),
    ("tasks.held_out=97", "has 100 distinct prompts, but tasks.held_out=97 and one step of train.prompts_per_step=4 need 101"),
    ("tasks.source=my_parts.py:letters", "tasks: a prompt cannot be encoded: the model's tokenizer has no token for ['a', 'b', 'c']"),
    ("tasks.source=my_parts.py:chat", "tasks: 50 of 50 prompts are lists of messages, but scratch llama has no chat template"),
    ("model.path=no/such/folder", "model.path no/such/folder: "),
    ("model.scratch.model_type=lama", "model.scratch.model_type: transformers has no causal language model 'lama'; did you mean"),
    ("model.scratch.config.hiden_size=3", "model.scratch.config: llama has no ['hiden_size']; did you mean 'hidden_size'?"),
    ("sampling.end_tokens=[<edn>]", "sampling.end_tokens: '<edn>' is not one token of the model's vocabulary"),
    ("evaluate.sampling.end_tokens=[<edn>]", "evaluate.sampling.end_tokens: '<edn>' is not one token"),
    ("sampling.max_new_tokens=30", "sampling.max_new_tokens is 30 and the longest prompt has 3 tokens, but scratch llama has a context of "
     "32 tokens; lower sampling.max_new_tokens to 29 or less"),
    ("evaluate.sampling.max_new_tokens=30", "evaluate.sampling.max_new_tokens is 30 and the longest prompt has 3 tokens"),
])
def test_refusals(look, sets, told):
    (line,) = refusals(look, sets)
    assert told in line


WRITTEN = """\
name: tiny
model: {scratch: {alphabet: "0123456789> ", config: {hidden_size: 32, num_attention_heads: 2}}}
data: {source: {ref: pairs_of_tasks, tasks: {ref: copy_digits, length: 2}}, held_out: 20}
train: {steps: 10, examples_per_step: 4}
"""


@pytest.mark.parametrize(("text", "told"), [
    (RECIPE + "algo: {kl: {coef: 0.1}}\n", ["method   standardize, ppo_clip, token_mean; a KL to the start"]),
    (RECIPE + "algo: {advantage: {ref: gae, gamma: 1.0, lam: 1.0}}\ncritic: {}\n", [
        "method   gae, ppo_clip, token_mean; a critic of its own",
    ]),
    (RECIPE + "preference: {}\n", ["method   preference: sigmoid"]),
    (RECIPE + "sft: {best_of: 1}\n", ["method   sft: cross_entropy, token_mean"]),
    (RECIPE + "preset: rloo\n", ["method   rloo: leave_one_out, reinforce, rollout_sum"]),
    (WRITTEN + "loop: reward_model\n", [
        "method   reward model: bradley_terry", "data     80 to train on, 20 held out",
        "run      10 steps of 4 pairs, 10 updates, 0.5 passes over the data",
    ]),
    (WRITTEN.replace("pairs_of_tasks", "of_tasks") + "loop: sft\n", [
        "run      10 steps of 4 answers, 10 updates, 0.5 passes over the data",
    ]),
])
def test_what_is_told_of_a_method(look, tmp_path, text, told):
    (tmp_path / "tiny.yaml").write_text(text)
    facts = examine(load_recipe("tiny.yaml")).facts
    assert set(told) <= set(facts), facts


GAE = ["algo.advantage={ref: gae, gamma: 1.0, lam: 0.95}"]
COST = ["rewards.1={fn: positions, cost: true}"]
TEACH = ["distill={teachers: [{model: {scratch: {alphabet: '0123456789> '}}}], divergence: null}"]


@pytest.mark.parametrize(("sets", "told"), [
    # advantages
    (["algo.advantage=reward_itself", "algo.constant_groups=drop"], "algo.constant_groups is drop, and algo.advantage reward_itself has"),
    (["algo.constant_groups=refill", "algo.kl={coef: 0.1, place: reward}"], "algo.constant_groups is refill, and algo.kl.place is reward"),
    (["algo.kl={coef: 0.1, place: token_reward}"], "algo.kl.place is token_reward, and algo.advantage standardize takes one rewa"),
    (GAE, "algo.advantage: gae needs the values of a critic; add a section critic"),
    (["critic={}"], "algo.advantage: standardize does not ask for the critic's values; use gae"),
    (["algo.advantage=teacher_gap", "algo.constant_groups=keep"], "algo.advantage: teacher_gap needs teachers; add distill with teachers"),
    (TEACH, "distill: neither algo.advantage standardize nor algo.loss asks for logp_teach; use advantage: teacher_gap"),
    (["algo.baseline_decay=0.5"], "algo.baseline_decay does nothing: algo.advantage standardize asks for no baseline; use minus_ema"),
    (["algo.advantage=my_parts.py:of_the_step"], "my_parts.py:of_the_step is one of a group (mark it @over_batch for the whole step) and"),
    # losses
    (["algo.loss=my_parts.py:loss_of_the_sampler"], "takes ratios to the sampler itself (logp_gen), so algo.correction would count the"),
    (["algo.loss=my_parts.py:loss_of_values"], "asks for value_cur, which is there only with critic"),
    (["algo.loss=my_parts.py:loss_of_teachers"], "asks for logp_teach, which is there only with distill"),
    (["algo.loss=my_parts.py:loss_of_scores"], "asks for score_cur, which a policy gradient does not have"),
    (["algo.loss=reinforce", "algo.correction=null", "algo.prox=gen"], "algo.prox does nothing: reinforce takes no ratio to logp_prox"),
    (["algo.loss=reinforce", "algo.correction=null", "algo.stop_at_kl_nats=1"], "algo.stop_at_kl_nats does nothing: reinforce takes no"),
    (["algo.stop_at_kl_nats=1"], "algo.stop_at_kl_nats does nothing: a step has one update"),
    (["algo.correction.fn.hi=3"], "algo.correction.fn: token_truncate takes no ['hi']"),
    (["algo.loss.eps_low=-1"], "algo.loss: ppo_clip: eps_low and eps_high are distances from the ratio 1"),
    (["algo.advantage={ref: gae, gamma: 1.0, lam: 2.0}", "critic={}"], "algo.advantage: gae: lam is 2.0; it must lie between 0 and 1"),
    (["algo.length_penalty={ref: soft_overlong, max_tokens: 2, cache_tokens: 5}"], "algo.length_penalty: soft_overlong: cache_tokens is 5"),
    (["algo.advantage={ref: standardize_each, weights: [1, 2]}"], "algo.advantage: standardize_each: 2 weights for 1 scores"),
    ([*GAE, "critic.loss={ref: clipped_error, clip: -1}"], "critic.loss: clipped_error: clip is a distance above 0"),
    (["algo.advantage=my_parts.py:by_place_only"], "takes ['reward'] by position only, and is called by name"),
    (["model.lora={rank: 2, dropout: 0.1}"], "a policy gradient compares the log-probs of sampler and trainer"),
    ([*COST, "constraint.limit=0.1", "algo.advantage=minus_ema"], "makes no advantage of one cost a rollout"),
    (["algo.normalize=whitten"], "algo.normalize: whitten: burnish.algorithms.advantages has no 'whitten'; did you mean 'whiten'?"),
    (["algo.length_penalty=soft_overlong"], "algo.length_penalty: soft_overlong needs ['"),
    ([*GAE, "critic.loss=clipped_error"], "critic.loss: clipped_error needs ['clip']"),
    # costs
    (COST, "rewards.1.cost is true, and only a section constraint reads costs; add one, or remove it"),
    (["constraint.limit=0.1"], "constraint: no entry of rewards has cost: true"),
    ([*COST, *GAE, "critic={}", "constraint.limit=0.1"], "constraint: algo.advantage gae makes no advantage of one cost a rollout"),
    (["rewards.0.cost=true", "constraint.limit=0.1"], "rewards: every entry is a cost, so there is no reward to learn from; add one"),
])
def test_refusals_of_policy_gradients(look, sets, told):
    (line,) = refusals(look, *sets)
    assert told in line


PLACES = """\
environments:
  - {name: a, tasks: {source: copy_digits, held_out: 1}, rewards: [{fn: exact}], prompts_per_step: 2}
  - {name: b, tasks: {source: {ref: copy_digits, length: 2}, held_out: 1}, rewards: [{fn: exact}], prompts_per_step: 2}
"""


@pytest.mark.parametrize(("sets", "told"), [
    ([], None),
    # the algorithm that an environment has in place of the run's, and the run's where all have their own
    (["environments.1.algo.advantage={ref: gae, gamma: 1.0, lam: 1.0}"], "environments.1.algo.advantage: gae needs the values of a critic"),
    (["environments.0.algo=" + GAE[0].replace("algo.advantage=", "{advantage: ") + "}",
      "environments.1.algo=" + GAE[0].replace("algo.advantage=", "{advantage: ") + "}", "critic={}"], None),
    (["environments.0.env=nowhere"], "environments.0.env: nowhere: burnish.envs has no 'nowhere'"),
    (["environments.1.rewards.0.fn=exactt"], "environments.1.rewards.0.fn: exactt: burnish.rewards has no 'exactt'"),
    (["environments.1.rewards.1={fn: positions, cost: true}"], "environments.1.rewards.1.cost is true, and only a section constraint"),
    (["environments.1.tasks.held_out=99"], "environments.1.tasks.held_out=99 and one step of environments.1.prompts_per_step=2 need 101"),
    (["environments.0.tasks.source=nowhere"], "environments.0.tasks.source: nowhere: burnish.data.sources has no 'nowhere'"),
])
def test_environments_are_told_by_their_place(look, tmp_path, sets, told):
    lines = [line for line in RECIPE.splitlines(keepends=True) if not re.match(r"tasks|  source|  held|rewards|  - fn", line)]
    (tmp_path / "tiny.yaml").write_text("".join(lines) + PLACES)
    if told is None:
        assert look(*sets) == []
    else:
        (line,) = refusals(look, *sets)
        assert told in line


def test_prompts_are_measured_also_where_there_are_many(look):
    for source in ("long", "many"):
        (line,) = refusals(look, f"tasks.source=my_parts.py:{source}", "tasks.held_out=0")
        assert "sampling.max_new_tokens is 8 and the longest prompt has 30 tokens" in line


def test_a_gguf_file_that_ends_too_early(look, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\x05\x00")
    (line,) = refusals(look, "model.path=cut.gguf")
    assert "cut.gguf" in line and "ends too early" in line


def test_all_problems_come_together(look):
    told = refusals(
        look, "rewards.0.fn=exactt", "train.samples_per_prompt=1", "tasks.source=nowhere", "model.path=no/such/folder", "env=nowhere"
    )
    assert [line.split(" ")[0].rstrip(":") for line in told] == [
        "train.samples_per_prompt", "env", "rewards.0.fn", "tasks.source", "model.path",
    ]


@pytest.mark.parametrize(("sets", "told"), [
    ("optim.lr=0", r"optim.lr is 0: the weights stay as they are"),
    ("optim.warmup_updates=10", r"optim.warmup_updates is 10, and the run makes 10 updates: the learning rate rises to the end"),
    ("sampling.temperature=0.1", r"samples of one prompt will be much alike"),
    ("train.samples_per_prompt=2", r"at least half of the groups have equal rewards"),
    ("tasks.held_out=0", r"nothing is measured on tasks that were not trained on"),
    ("evaluate.every_steps=11", r"evaluated before and after only"),
    ("evaluate.samples_per_task=4", r"all samples are the same"),
    ("sampling.stop=['>']", r"evaluate.sampling and sampling differ in stop: held-out answers end elsewhere"),
])
def test_notes(look, sets, told):
    (note,) = look(sets)
    assert re.search(told, note)


def test_a_note_on_a_critic_that_warms_up_to_the_end(look):
    (note,) = look("algo.advantage={ref: gae, gamma: 1.0, lam: 1.0}", "critic.warmup_steps=10")
    assert note == "critic.warmup_steps is 10, and the run has 10 steps: the policy learns in none of them"


def test_note_on_repeated_prompts(look):
    assert look("tasks.source=my_parts.py:few", "tasks.held_out=5")[0] == "20 tasks have the prompt of another and are left out"
    assert not any("warmup" in note for note in look("optim.warmup_updates=10", "train.epochs=2"))
