"""Presets: what is laid under a recipe, what wins, what is told; every one fits the code, every shipped recipe loads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from burnish.cli import app
from burnish.config.load import SettingsError, dump, load_recipe, resumable_changes, shipped
from burnish.config.presets import POLICY_GRADIENTS, PRESETS
from burnish.config.settings import Settings
from burnish.plan.preflight import examine
from burnish.plan.references import problems_of_references
from burnish.ref import Ref

TOP = "name: mine\nmodel: {scratch: {alphabet: '0123456789>', config: {hidden_size: 32, num_attention_heads: 2}}}\n"
SYNC = TOP + (
    "tasks: {source: {ref: copy_digits, length: 2}, held_out: 10}\nrewards: [{fn: positions}]\n"
    "sampling: {max_new_tokens: 2}\nevaluate: {sampling: {max_new_tokens: 2}}\n"
)
NEEDED = {
    "algo.reduce.length": "2", "algo.length_penalty.max_tokens": "4", "algo.length_penalty.cache_tokens": "1",
    "algo.advantage.weights": "[1.0]", "constraint.limit": "0.5", "distill.teachers": "[{model: {path: somewhere}}]",
}


@pytest.fixture
def recipe(tmp_path):
    """recipe(text, *sets) loads a file mine.yaml that says so."""
    def load(text: str, *sets: str, top: str = SYNC, **given) -> Settings:
        path = tmp_path / "mine.yaml"
        path.write_text(top + "train: {steps: 2, prompts_per_step: 8, samples_per_prompt: 8}\n" * ("train:" not in text) + text)
        return load_recipe(path, sets=sets, overrides=given, note=lambda line: None)
    return load


def refused(load, *args, **kwargs) -> str:
    with pytest.raises(SettingsError) as error:
        load(*args, **kwargs)
    return str(error.value)


# what wins

def test_a_preset_gives_what_the_recipe_does_not_say(recipe):
    algo = recipe("preset: reinforce_pp\n").algo
    assert (algo.advantage, algo.normalize, algo.reduce) == (Ref("returns_to_go"), Ref("whiten"), Ref("token_mean"))
    assert algo.loss == Ref("ppo_clip", {"eps_low": 0.2, "eps_high": 0.2}) and algo.kl.place == "token_reward"


def test_sections_merge_by_key_and_the_recipe_wins(recipe):
    train = "train: {steps: 3, prompts_per_step: 8, samples_per_prompt: 8, minibatches: 2}\n"
    settings = recipe("preset: ppo\nalgo:\n  kl: {coef: 0.5}\n" + train)
    assert (settings.algo.kl.coef, settings.algo.kl.place, settings.algo.kl.estimator) == (0.5, "token_reward", "k1")
    assert settings.train.minibatches == 2 and settings.critic.kind == "model"
    assert recipe("preset: ppo\n").train.minibatches == 8


@pytest.mark.parametrize(("said", "loss"), [
    ("loss: reinforce", Ref("reinforce")),
    ("loss: {ref: gspo, eps_low: 0.1, eps_high: 0.1}", Ref("gspo", {"eps_low": 0.1, "eps_high": 0.1})),
    ("loss: {eps_high: 0.3}", Ref("ppo_clip", {"eps_low": 0.2, "eps_high": 0.3})),
])
def test_a_reference_that_is_named_is_whole_and_values_alone_change_values(recipe, said, loss):
    assert recipe(f"preset: grpo\nalgo: {{{said}}}\n").algo.loss == loss


def test_nothing_takes_a_part_of_a_preset_away(recipe):
    assert recipe("preset: grpo\nalgo: {kl: null}\n").algo.kl is None
    told = refused(recipe, "preset: grpo\nalgo:\n")
    assert "mine.yaml, lines 9-10: algo: found nothing (null), which takes away what preset grpo gives" in told


def test_set_changes_one_value_of_the_preset(recipe):
    algo = recipe("preset: dapo\nalgo: {length_penalty: {max_tokens: 4, cache_tokens: 2}}\n", "algo.loss.eps_high=0.3").algo
    assert algo.loss == Ref("ppo_clip", {"eps_low": 0.2, "eps_high": 0.3}) and algo.constant_groups == "refill"
    assert algo.length_penalty == Ref("soft_overlong", {"max_tokens": 4, "cache_tokens": 2})


def test_presets_are_not_changed_by_use(recipe):
    before = json.dumps({name: preset.values for name, preset in PRESETS.items()})
    recipe("preset: ppo\nalgo: {kl: {coef: 9}}\n", "algo.advantage.lam=0.5", "critic.kind=head", "train.minibatches=1")
    assert json.dumps({name: preset.values for name, preset in PRESETS.items()}) == before


# a preset given by --set

def test_a_preset_by_set_takes_the_place_of_the_recipes_method(recipe, capsys):
    text = "preset: ppo\nalgo: {kl: {coef: 9}, loss: reinforce}\ncritic: {lr: 0.1}\n"
    asked = recipe(text, "preset=gspo", "algo.loss.eps_low=0.1")
    plain = recipe("preset: gspo\nalgo: {loss: {eps_low: 0.1}}\n")
    assert asked == plain and asked.critic is None and asked.algo.kl is None
    assert recipe(text, preset="gspo").algo == recipe("preset: gspo\n").algo
    assert recipe("algo: {loss: reinforce}\ntrain: {steps: 2, prompts_per_step: 8, samples_per_prompt: 8, minibatches: 2}\n",
                  "preset=ppo").train.minibatches == 8


def test_it_is_told_what_is_left_out(tmp_path):
    lines = []
    load_recipe("from-scratch-tiny", sets=["preset=rloo"], note=lines.append)
    assert lines == ["algo of the recipe is left out, because --set preset=rloo gives the method"]


def test_no_preset_by_set_leaves_the_recipe_alone(recipe):
    assert recipe("preset: grpo\nalgo: {loss: reinforce}\n", "preset=null") == recipe("algo: {loss: reinforce}\n")


# what is told

def test_an_unknown_preset(recipe):
    told = refused(recipe, "preset: drgrpo\n")
    assert "mine.yaml, line 8: preset: no preset is called 'drgrpo'; did you mean dr_grpo" in told and ", rloo," in told
    assert "--set preset=pp: preset: no preset is called 'pp'; did you mean ppo" in refused(recipe, "", "preset=pp")
    assert "preset: expected a text, found the number 3" in refused(recipe, "preset: 3\n")


@pytest.mark.parametrize(("text", "sets", "told"), [
    ("preset: gspo\nalgo: {prox: gen}\n", (), "algo: prox: gen takes ratios to the sampler itself"),
    ("preset: dapo\ntrain: {steps: 1, prompts_per_step: 2, samples_per_prompt: 2}\n", (),
     "train.minibatches is 16, but a step has only 4 rollouts (train.minibatches: preset dapo)"),
    ("preset: ppo\n", ("critic.coef=1.0",), "preset ppo: critic: coef does nothing with kind: model"),
])
def test_a_problem_with_a_value_of_the_preset_names_it(recipe, text, sets, told):
    assert told in refused(recipe, text, *sets)


def test_settings_from_python_do_not_name_a_preset_that_nobody_fills_in(recipe):
    raw = recipe("preset: gspo\n").model_dump_json()
    with pytest.raises(ValueError, match="preset is a name for values that load_recipe fills in"):
        Settings.model_validate_json(raw)


# saved settings

@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_fits_the_code_and_its_saved_settings_load_back(preset, tmp_path):
    values = PRESETS[preset].values
    loop = values.get("loop", "sync")
    sync = "train: {steps: 2, prompts_per_step: 8, samples_per_prompt: 8}\n"
    written = "data: {source: {ref: of_tasks, tasks: {ref: copy_digits}}}\ntrain: {steps: 2, examples_per_step: 64}\n"
    cost = "rewards: [{fn: positions}, {fn: exact, cost: true}]\n"
    top = SYNC.replace("rewards: [{fn: positions}]\n", cost) if "constraint" in values else SYNC
    path = tmp_path / "mine.yaml"
    path.write_text(f"preset: {preset}\n{top + sync if loop == 'sync' else TOP + written}")
    settings = load_recipe(path, sets=[f"{name}={NEEDED[name]}" for name in PRESETS[preset].needs])
    assert list(problems_of_references(settings)) == []
    saved = tmp_path / "settings.yaml"
    saved.write_text(dump(settings))
    again = load_recipe(saved)
    assert again == settings and resumable_changes(settings, again) == [] and again.preset == preset


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if preset.needs])
def test_what_a_preset_needs_is_asked_for(preset, recipe):
    """A forgotten one is refused by its name, not filled in."""
    if PRESETS[preset].values.get("loop", "sync") != "sync":
        pytest.skip("the recipe here is one of loop sync")
    for needed in PRESETS[preset].needs:
        others = [f"{name}={NEEDED[name]}" for name in PRESETS[preset].needs if name != needed]
        try:
            told = "\n".join(problems_of_references(recipe(f"preset: {preset}\n", *others)))
        except SettingsError as error:
            told = str(error)
        assert needed.rpartition(".")[2] in told, (needed, told)


# shipped recipes

@pytest.mark.parametrize("info", shipped(), ids=lambda info: info.name)
def test_every_shipped_recipe_loads_and_its_parts_exist(info, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_recipe(info.path)
    assert settings.name == info.name and settings.about and settings.expect
    if others := [r.fn.values["paths"] for r in settings.rewards if r.fn.path == "learned"]:     # models that other recipes leave
        told = list(problems_of_references(settings))
        assert len(told) == len(others)
        assert all(re.search(r"make it first: burnish train (\S+)$", line)[1] in {i.name for i in shipped()} for line in told)
        return
    data_here = settings.data is None or Path(settings.data.source.values.get("path", ".")).exists()
    if data_here and ((settings.model.path or "").startswith("package:") or settings.model.scratch is not None):
        examine(settings)
    else:
        assert list(problems_of_references(settings)) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_tiny_recipe(preset):
    settings = load_recipe(f"{preset.replace('_', '-')}-tiny")
    assert settings.preset == preset and settings.model.scratch is not None


# the command

def test_presets_are_listed_with_their_sources():
    told = CliRunner().invoke(app, ["presets"])
    assert told.exit_code == 0
    for name, preset in PRESETS.items():
        assert any(line.startswith(f"{name} ") and preset.about in line and preset.source in line for line in told.stdout.splitlines())
    shown = CliRunner().invoke(app, ["presets", "--help"]).output
    assert "Examples:" in shown and "    burnish presets dapo" in shown


@pytest.mark.parametrize("preset", POLICY_GRADIENTS)
def test_a_preset_is_shown_as_a_recipe_would_say_it(preset, recipe):
    """Copied into a recipe in place of its name it gives the same settings."""
    told = CliRunner().invoke(app, ["presets", preset])
    assert told.exit_code == 0
    body = "".join(line for line in told.stdout.splitlines(True) if not line.startswith("preset:"))
    train = "train: {steps: 2, prompts_per_step: 8, samples_per_prompt: 8}\n"
    needed = [f"{name}={NEEDED[name]}" for name in PRESETS[preset].needs]
    if "train:" in body:
        body = body.replace("train:\n", "train:\n  steps: 2\n  prompts_per_step: 8\n  samples_per_prompt: 8\n")
        train = ""
    copied = recipe(train + body, *needed)
    assert copied == recipe(f"preset: {preset}\n", *needed).model_copy(update={"preset": None})


def test_an_unknown_name_is_told():
    told = CliRunner().invoke(app, ["presets", "dap"])
    assert told.exit_code == 2 and "no preset is called 'dap'; did you mean dapo" in told.stderr


def test_sources_are_papers_or_places():
    for name, preset in PRESETS.items():
        assert preset.about.endswith((".", ")")) and preset.source, name
        json.dumps(preset.values)
    assert Path(__file__).parents[2].joinpath("burnish/config/presets.py").read_text().count("import torch") == 0
