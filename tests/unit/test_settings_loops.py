"""The settings of each loop: what it needs, what it does not read, what goes together; and that what is printed loads back equal."""

from __future__ import annotations

import re

import pytest

from burnish.config import Algo, Preference, RewardModel, Settings, Sft, schema
from burnish.config.errors import ELSEWHERE
from burnish.config.load import SettingsError, dump, load_recipe, resumable_changes

TOP = 'name: mine\nmodel: {scratch: {alphabet: "0123456789>"}}\n'
SYNC = TOP + """\
tasks: {source: copy_digits}
rewards: [{fn: exact}]
train: {steps: 5, prompts_per_step: 4, samples_per_prompt: 4}
"""
DATA = TOP + """\
data: {source: {ref: of_tasks, tasks: copy_digits}}
train: {steps: 5, examples_per_step: 4}
"""
PLACES = TOP + """\
environments:
  - {name: short, tasks: {source: copy_digits}, rewards: [{fn: exact}], prompts_per_step: 3}
  - {name: long, tasks: {source: reverse_digits}, rewards: [{fn: exact}], prompts_per_step: 1, algo: {advantage: center}}
train: {steps: 5, prompts_per_step: 4, samples_per_prompt: 4}
"""
ENVIRONMENTS = PLACES[len(TOP) : PLACES.index("train:")]
TEACHER = "{model: {path: a}}"
LOOPS = {
    "sync": SYNC,
    "ppo": SYNC + "algo: {advantage: {ref: gae, gamma: 1.0, lam: 0.95}, normalize: whiten}\ncritic: {lr: 1e-4, warmup_steps: 2}\n",
    "head": SYNC + "algo: {advantage: gae, stop_at_kl_nats: 0.1}\ncritic: {kind: head, coef: 0.1, loss: {ref: clipped_error, clip: 0.1}}\n",
    "constrained": SYNC.replace("[{fn: exact}]", "[{fn: exact}, {fn: positions, cost: true}]") + "constraint: {limit: 0.5}\n",
    "environments": PLACES,
    "preset": SYNC + "preset: reinforce_pp\n",
    "online_dpo": SYNC + "preference: {nll_coef: 0.1}\n",
    "rejection": SYNC + "sft: {best_of: 1, min_reward: 0.5}\n",
    "on_policy_distillation": SYNC + f"distill: {{teachers: [{TEACHER}]}}\n",
    "teacher_gap": SYNC + f"algo: {{advantage: teacher_gap}}\ndistill: {{teachers: [{TEACHER}], divergence: null}}\n",
    "sft": DATA + "loop: sft\n",
    "sft_evaluated": DATA
    + "loop: sft\ntasks: {source: copy_digits, held_out: 5}\nrewards: [{fn: exact}]\nevaluate: {success_reward: 0.5}\n",
    "preference": DATA
    + "loop: preference\npreference: {losses: [{fn: {ref: sigmoid, beta: 0.1}, weight: 2.0}, {fn: ipo}], refresh_steps: 3}\n",
    "reward_model": DATA + "loop: reward_model\nreward_model: {center_coef: 0.01}\n",
    "distill": DATA
    + f"loop: distill\ndistill: {{teachers: [{TEACHER}, {TEACHER}], on_policy_frac: 0.5}}\nsampling: {{max_new_tokens: 3}}\n",
}


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text: str, *sets: str) -> Settings:
        (tmp_path / "mine.yaml").write_text(text)
        return load_recipe("mine.yaml", sets=sets, note=lambda line: None)

    return load


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_printed_loads_back_equal_and_may_be_resumed(load, loop):
    settings = load(LOOPS[loop])
    again = load(dump(settings))
    assert again == settings and dump(again) == dump(settings)
    assert resumable_changes(settings, again) == []
    changed = load(dump(settings), "train.steps=9", "optim.lr=1e-3")
    assert [line.split(":")[0] for line in resumable_changes(settings, changed)] == ["train.steps", "optim.lr"]


def test_the_critic_s_rate_may_change_on_resume_and_its_loss_may_not(load):
    settings = load(LOOPS["ppo"])
    assert len(resumable_changes(settings, load(LOOPS["ppo"], "critic.lr=2e-4"))) == 1
    with pytest.raises(SettingsError, match=r"^critic\.loss: .*cannot change when a run is resumed"):
        resumable_changes(settings, load(LOOPS["ppo"], "critic.loss.clip=0.1"))


@pytest.mark.parametrize(("text", "method"), [
    (SYNC, Algo()), (DATA + "loop: sft\n", Sft()), (DATA + "loop: preference\n", Preference()),
    (DATA + "loop: reward_model\n", RewardModel()),
])
def test_a_loop_without_its_section_has_the_defaults_and_says_them(load, text, method):
    settings = load(text)
    given = [one for name in ("algo", "sft", "preference", "reward_model", "distill") if (one := getattr(settings, name)) is not None]
    assert given == [method]
    section = next(name for name in Settings.model_fields if getattr(settings, name) is method or getattr(settings, name) == method)
    assert re.search(rf"^{section}:.*\n  \w+:", dump(settings), re.M)


def test_teachers_of_an_advantage_bring_the_algorithm_of_rollouts(load):
    settings = load(SYNC + f"distill: {{teachers: [{TEACHER}], divergence: null}}\n")
    assert settings.algo == Algo()


@pytest.mark.parametrize("word", ELSEWHERE)
def test_hints_lead_to_settings_that_exist(word):
    names = re.findall(r"\b[a-z_]+(?:\.[a-z_0-9]+)*", re.sub(r"\(.*?\)|, or | for .*", " ", ELSEWHERE[word]))
    assert names
    for name in names:
        assert schema.place_of(tuple(int(part) if part.isdecimal() else part for part in name.split("."))) is not None, name


REFUSED = [
    # what a loop needs
    (SYNC, ["tasks=null"], "loop: sync needs tasks and at least one entry of rewards"),
    (SYNC, ["train.prompts_per_step=null"], "train.prompts_per_step is needed in loop: sync"),
    (SYNC, ["train.samples_per_prompt=null"], "train.samples_per_prompt is needed in loop: sync"),
    (DATA, ["loop=distill"], "loop: distill needs the section distill"),
    (DATA, ["loop=sft", "data=null"], "loop: sft needs data"),
    (DATA, ["loop=sft", "train.examples_per_step=null"], "loop: sft needs train.examples_per_step"),
    (PLACES, ["train.prompts_per_step=null"], "train.prompts_per_step is needed: the sum of the environments' prompts_per_step"),
    # what it does not read
    (SYNC, ["data.source=of_tasks"], "data is not read in loop: sync; remove it, or set loop: sft, preference, reward_model or distill"),
    (DATA, ["preference.nll_coef=1"], "data is not read in loop: sync; remove it, or set loop: preference"),
    (SYNC, ["train.examples_per_step=3"], "train.examples_per_step is not read in loop: sync"),
    (DATA, ["loop=sft", "train.prompts_per_step=3"], "train.prompts_per_step is not read in loop: sft"),
    (DATA, ["loop=sft", "algo.truncated=drop"], "the section algo is not read in loop: sft"),
    (SYNC, ["reward_model={}"], "the section reward_model is not read in loop: sync"),
    (DATA, ["loop=sft", "critic={}"], "critic belongs to a policy-gradient method (the section algo)"),
    (SYNC, ["sft.best_of=1", "constraint.limit=1"], "constraint belongs to a policy-gradient method (the section algo)"),
    (DATA, ["loop=sft", "sampling.max_new_tokens=3"], "sampling is not read in loop: sft; evaluate.sampling is what held-out answers"),
    (DATA, ["loop=sft", "env=a:b"], "env does nothing in loop: sft without tasks and rewards to evaluate on"),
    (DATA, ["loop=sft", "engine={ref: native, slots: 3}"], "engine does nothing in loop: sft without tasks and rewards"),
    (DATA, ["loop=sft", "evaluate.samples_per_task=3"], "evaluate.samples_per_task does nothing in loop: sft without tasks"),
    (DATA, ["loop=sft", "evaluate.success_reward=3"], "evaluate.success_reward does nothing in loop: sft without tasks"),
    (DATA, ["loop=sft", "tasks.source=copy_digits"], "tasks and rewards are for evaluation here; give both or neither"),
    (DATA, ["loop=sft", "tasks.source=a", "rewards.0.fn=exact"], "set tasks.held_out to how many to evaluate on"),
    (DATA, ["loop=reward_model", "tasks={source: a, held_out: 3}", "rewards.0.fn=exact"], "a reward model does not answer, remove them"),
    (DATA + ENVIRONMENTS, ["loop=sft"], "environments are not read in loop: sft"),
    # one method
    (SYNC, ["algo.truncated=drop", "sft.best_of=1"], "the sections algo and sft are methods of their own; keep one of them ("),
    (SYNC, ["algo.truncated=drop", f"distill.teachers=[{TEACHER}]"], "or give the teachers to the algorithm's advantage by distill.diverg"),
    (DATA, ["loop=distill", f"distill={{teachers: [{TEACHER}], divergence: null}}"], "distill.divergence null leaves the teachers to the"),
    # environments
    (PLACES, ["tasks.source=copy_digits"], "environments stand in place of tasks, env and rewards"),
    (PLACES, ["env=a:b"], "environments stand in place of tasks, env and rewards"),
    (PLACES, ["train.prompts_per_step=5"], "train.prompts_per_step is 5, but the environments' add up to 4"),
    (PLACES, ["environments.1.name=short"], "two environments have the same name: ['short', 'short']"),
    (PLACES, ["sft.best_of=1"], "environments are for policy-gradient methods (the section algo)"),
    (PLACES, ["constraint.limit=1"], "constraint keeps one mean cost, of the rewards of a run without environments"),
    (PLACES, ["environments.0.algo.truncated=drop", "algo.truncated=drop"], "algo is read by no environment, since each has its own"),
    (PLACES, ["environments.0.rewards.1.fn=exact"], "the same reward stands twice in environments short"),
    (PLACES, ["environments.0.name=Short one"], "environments.0.name: expected"),
    # inside a section
    (SYNC, ["algo.prox=gen"], "prox: gen takes ratios to the sampler itself, which leaves nothing to correct; set correction: null"),
    (SYNC, ["algo.refill_rounds=5"], "refill_rounds does nothing without constant_groups: refill"),
    (SYNC, ["algo.entropy={coef: 0}"], "coef 0 without target_nats does nothing"),
    (SYNC, ["algo.entropy={coef: 0.1, delta: 0.1}"], "delta does nothing without target_nats"),
    (SYNC, ["algo.entropy={coef: 0.1, max_coef: 0.1}"], "max_coef does nothing without target_nats"),
    (SYNC, ["algo.kl={coef: 0.1, estimator: exact, place: reward}"], "estimator: exact is a loss with its own gradient"),
    (SYNC, ["algo.kl={coef: 0.1, estimator: k2, gradient: importance_weighted}"], "k2 with an importance-weighted gradient is biased"),
    (SYNC, ["critic={kind: head, lr: 0.1}"], "lr does nothing with kind: head"),
    (SYNC, ["critic={kind: head, model: {path: a}}"], "model does nothing with kind: head"),
    (SYNC, ["critic={coef: 0.1}"], "coef does nothing with kind: model"),
    (DATA, ["loop=preference", "preference.refresh_mix=0.5"], "refresh_mix does nothing without refresh_steps"),
    (DATA, ["loop=preference", "preference={reference: none, refresh_steps: 5}"], "refresh_steps moves the reference, and reference: none"),
    (DATA, ["loop=preference", "preference.nll_normalization=token_mean"], "nll_normalization does nothing without nll_coef"),
    (DATA, ["loop=preference", "preference.losses=[]"], "preference.losses: expected at least 1 in the list, found a list of 0"),
    (SYNC, [f"distill={{teachers: [{TEACHER}], divergence: null, temperature: 2}}"], "temperature does nothing with divergence: null"),
    (SYNC, [f"distill={{teachers: [{TEACHER}], divergence: null, reduce: rollout_sum}}"], "reduce does nothing with divergence: null"),
    (SYNC, ["distill.teachers=[{model: {path: a}, weight: 2.0}]"], "the weight of a single teacher does nothing"),
    (SYNC, ["distill.teachers=[{model: {path: a, lora: {}}}]"], "model.lora does nothing in a teacher, which is not trained"),
    # how much a step takes
    (SYNC, ["train.minibatches=17"], "train.minibatches is 17, but a step has only 16 rollouts"),
    (DATA, ["loop=sft", "train.minibatches=5"], "train.minibatches is 5, but a step has only 4 examples"),
]


@pytest.mark.parametrize(("text", "sets", "told"), REFUSED, ids=[told[:60] for _, _, told in REFUSED])
def test_refused_with_what_was_found_and_what_would_work(load, text, sets, told):
    with pytest.raises(SettingsError) as error:
        load(text, *sets)
    (line,) = error.value.problems
    assert told in line
    assert "--set" in line or "mine.yaml, line" in line, "it says neither where the setting stands nor which --set gave it"
