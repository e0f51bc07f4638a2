import subprocess
import sys
from pathlib import Path

import pytest

from burnish.config import EvalSampling, Sampling, Settings
from burnish.config.load import RecipeInfo, SettingsError, diff, dump, load_recipe, resumable_changes, shipped
from burnish.ref import Ref

RECIPE = """\
name: tiny
about: A recipe for tests.
model:
  scratch:
    alphabet: "0123456789 "
    config: {hidden_size: 64}
tasks:
  source: {ref: digits, length: 3}
rewards:
  - fn: exact
    weight: 1
train:
  steps: 50
  prompts_per_step: 4
  samples_per_prompt: 8
optim:
  lr: 1e-3
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a recipe and returns its path; the text may be changed by pairs of (old, new)."""
    monkeypatch.chdir(tmp_path)

    def write(*changes: tuple[str, str], text: str = RECIPE) -> Path:
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "tiny.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(*args, **kwargs) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load_recipe(*args, **kwargs)
    assert all(line in str(caught.value) for line in caught.value.problems)
    return caught.value.problems


# --- what loads

def test_values_come_as_written(recipe):
    settings = load_recipe(recipe(("weight: 1\n", "weight: 1\nsampling:\n  stop: [\"\\n\", END]\n  end_tokens: [<a>]\n")))
    assert settings.optim.lr == 1e-3 and isinstance(settings.optim.lr, float)
    assert settings.rewards[0].weight == 1.0 and isinstance(settings.rewards[0].weight, float)
    assert settings.sampling.stop == ("\n", "END") and settings.sampling.end_tokens == ("<a>",)
    assert settings.tasks.source == Ref("digits", {"length": 3})
    assert settings.model.scratch.config == {"hidden_size": 64}


def test_evaluation_stays_greedy_when_only_another_part_of_it_is_given(recipe):
    settings = load_recipe(recipe(text=RECIPE + "evaluate:\n  sampling: {max_new_tokens: 7}\n"))
    assert settings.evaluate.sampling == EvalSampling(temperature=0.0, max_new_tokens=7)
    assert load_recipe(recipe(), sets=["evaluate.sampling.max_new_tokens=7"]) == settings


@pytest.mark.parametrize(("text", "value"), [
    ("1e-5", 1e-5), ("010", 10), ("0x1F", 31), ("0o17", 15), ("yes", "yes"), ("2020-01-01", "2020-01-01"), ("12:30", "12:30"),
    ("'32'", "32"), ("True", True), ("~", None), ("", None), (".inf", float("inf")), ("-.inf", float("-inf")), ("+3", 3),
    ("[1, two]", [1, "two"]), ("=", "="), ("{a: {b: 1.5}}", {"a": {"b": 1.5}}), ("!!str 5", "5"),
])
def test_yaml_1_2_values(recipe, text, value):
    settings = load_recipe(recipe(("length: 3", f"length: {text}")))
    assert settings.tasks.source.values == {"length": value} and type(settings.tasks.source.values["length"]) is type(value)


def test_aliases_and_byte_order_mark(recipe, tmp_path):
    path = recipe(("{hidden_size: 64}", "&c {hidden_size: 64}"), ("length: 3", "length: *c"))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_recipe(path).tasks.source.values == {"length": {"hidden_size": 64}}


# --- what is refused, and how

def test_unknown_names_tell_line_and_nearest_name(recipe):
    told = problems(recipe(("steps: 50", "stepz: 50"), ("lr: 1e-3", "lr: 1e-3\n  temperature: 0.7\n  learning_rate: 3\n  qqq: 1")))
    assert told[0].startswith("tiny.yaml, lines 12-15: train.steps: this setting is required")
    assert told[1:] == (
        "tiny.yaml, line 13: train.stepz: there is no such setting; did you mean train.steps? (found the number 50)",
        "tiny.yaml, line 18: optim.temperature: there is no such setting; temperature stands elsewhere: sampling.temperature "
        "and distill.temperature and evaluate.sampling.temperature (found the number 0.7)",
        "tiny.yaml, line 19: optim.learning_rate: there is no such setting; here it is called optim.lr (found the number 3)",
        "tiny.yaml, line 20: optim.qqq: there is no such setting; optim has lr, betas, eps, weight_decay, clip_norm, warmup_updates, "
        "schedule, final_lr_frac (found the number 1)",
    )


def test_unknown_name_at_the_top_that_belongs_to_a_section(recipe):
    (told,) = problems(recipe(text=RECIPE + "sampels_per_prompt: 3\n"))
    assert "tiny.yaml, line 18: sampels_per_prompt: there is no such setting; did you mean train.samples_per_prompt?" in told


STEPS, LR, FN = "steps: 50", "lr: 1e-3", "rewards:\n  - fn: exact\n    weight: 1\n"
CONFIG, SOURCE = "config: {hidden_size: 64}", "source: {ref: digits, length: 3}"
MODEL = RECIPE[RECIPE.index("model:"): RECIPE.index("tasks:")]


@pytest.mark.parametrize(("old", "new", "told"), [
    (STEPS, "steps: '32'", "line 13: train.steps: expected a whole number, found the text '32'; remove the quotes"),
    (STEPS, "steps: 1.5", "line 13: train.steps: expected a whole number, found the number 1.5"),
    (STEPS, "steps: true", "line 13: train.steps: expected a whole number, found true"),
    (STEPS, "steps: 0", "line 13: train.steps: expected greater than 0, found the number 0"),
    (STEPS, "steps: ~", "line 13: train.steps: expected a whole number, found nothing (null)"),
    (LR, "lr: fast", "line 17: optim.lr: expected a number, found the text 'fast'"),
    (LR, "lr: .nan", "line 17: optim.lr: expected a finite number, found the number nan"),
    (LR, "betas: [0.9]", "line 17: optim.betas.1: the list is too short"),
    (LR, "betas: [0.9, 2]", "line 17: optim.betas.1: expected less than 1, found the number 2"),
    (LR, "schedule: cosin", "expected 'cosine', 'linear' or 'constant', found the text 'cosin'; did you mean cosine?"),
    ("name: tiny", "name: 3", "line 1: name: expected a text, found the number 3; put it in quotes"),
    (FN, "rewards: []\n", "needs tasks and at least one entry of rewards (tasks: tiny.yaml, lines 7-8; rewards: tiny.yaml, line 9)"),
    (FN, "rewards:\n  - exact\n", "line 10: rewards.0: expected a section with fn, name, weight, "),
    (FN, "", "tiny.yaml: loop: sync needs tasks and at least one entry of rewards (tasks: tiny.yaml, lines 7-8)"),
    ("optim:\n  lr: 1e-3", "optim: 3", "line 16: optim: expected a section with lr, betas"),
    (SOURCE, "source: {length: 3}", "line 8: tasks.source: a reference with values needs the key `ref`"),
    (SOURCE, "shuffle: true", "lines 7-8: tasks.source: this setting is required: A function that returns"),
    (MODEL, "", "tiny.yaml: model: this section is required"),
    (CONFIG, "config: {}\n  lora: {targets: 3}", "model.lora.targets: expected a text or a list, found the number 3"),
    (CONFIG, "config: {}\n  lora: {targets: [a, 3]}", "model.lora.targets.1: expected a text, found the number 3"),
])
def test_wrong_values(recipe, old, new, told):
    (line,) = problems(recipe((old, new)))
    assert told in line and line.startswith("tiny.yaml")


@pytest.mark.parametrize(("text", "told"), [
    ("", "tiny.yaml: the file is empty"),
    ("# only a comment\n", "tiny.yaml: the file is empty"),
    ("- a\n- b\n", "tiny.yaml, line 1: expected settings as"),
    ("name: a\nmodel: [1, 2\ntrain: 3\n",
     "tiny.yaml, line 3: YAML syntax: while parsing a flow sequence expected ',' or ']', but got ':' (it began on line 2)"),
    ("name: a\nabout: b: c\n", "tiny.yaml, line 2: YAML syntax: a second `name: value` on one line"),
    ("name: a\n\tabout: b\n", "tiny.yaml, line 2: YAML syntax: YAML indents with spaces; this line has a tab"),
    ("name: a\nabout: *nowhere\n", "tiny.yaml, line 2: YAML syntax: found undefined alias 'nowhere'"),
    ("name: \x07\n", "tiny.yaml: this is no YAML text"),
])
def test_syntax(recipe, text, told):
    (line,) = problems(recipe(text=text))
    assert line.startswith(told)


def test_repeated_keys_are_told_together_with_other_errors(recipe):
    told = problems(recipe(("steps: 50", "steps: 50\n  steps: 60"), ("lr: 1e-3", "lr: fast")))
    assert told[0] == "tiny.yaml, line 14: train.steps: stands twice, first on line 13; keep one of the two"
    assert told[1].startswith("tiny.yaml, line 18: optim.lr")


def test_alias_of_itself_and_unknown_tags_end_in_an_error(recipe):
    told = problems(recipe(("{hidden_size: 64}", "&c [*c]"), ("length: 3", "length: !odd 3")))
    assert any(line.startswith("tiny.yaml, line 6: model.scratch.config.0: an alias that holds itself") for line in told)
    assert any(line.startswith("tiny.yaml, line 8: tasks.source.length: !odd") for line in told)


def test_contradictions_name_the_lines_of_the_section(recipe):
    text = RECIPE + "algo:\n  kl:\n    coef: 0.1\n    estimator: k1\n"
    (line,) = problems(recipe(text=text))
    assert line.startswith("tiny.yaml, lines 19-21: algo.kl: k1 as a loss with the naive gradient does nothing")
    (line,) = problems(recipe(text=text.replace("k1", "k3")), sets=["algo.kl.estimator=k1"])
    assert line.startswith("tiny.yaml, lines 19-21: algo.kl: k1 as a loss") and line.endswith("(--set algo.kl.estimator=k1)")
    (line,) = problems(recipe(("steps: 50", "steps: 50\n  minibatches: 33")))
    assert line.endswith("but a step has only 32 rollouts (train.minibatches: tiny.yaml, line 14)")


@pytest.mark.parametrize(("sets", "told"), [
    (["optim.final_lr_frac=0.1"], "optim: final_lr_frac does nothing with schedule: constant"),
    (["algo.kl={coef: 0.1, horizon_rollouts: 5}"], "algo.kl: horizon_rollouts does nothing without target_nats"),
    (["algo.kl={coef: 0, target_nats: 3}"], "algo.kl: target_nats adapts coef by a factor"),
    (["algo.kl={coef: 1, place: reward, gradient: straight_through_k2}"], "algo.kl: gradient belongs to place: loss"),
    (["sampling.temperature=0"], "sampling.temperature 0 draws the same sample each time"),
    (["sampling.stop=['']"], "sampling: an empty stop string would end every turn at once"),
    (["rewards.1.fn=exact"], "the same reward stands twice in rewards"),
    (["model.scratch=null"], "model: give exactly one of model.path"),
])
def test_settings_that_contradict_each_other_or_do_nothing(recipe, sets, told):
    (line,) = problems(recipe(), sets=sets)
    assert told in line and sets[0].partition(".")[0] in line


def test_files_and_names_that_are_not_there(recipe, tmp_path):
    path = recipe()
    assert problems(tmp_path / "tinny.yaml") == (f"no such file: {tmp_path / 'tinny.yaml'}; did you mean {path}?",)
    (line,) = problems("from-scratch-tinny")
    assert line.startswith("no recipe is called 'from-scratch-tinny'; did you mean from-scratch-tiny? `burnish recipes` lists all ")
    (line,) = problems(tmp_path)
    assert line.startswith(f"{tmp_path} is a folder; give a YAML file")
    (tmp_path / "settings.yaml").write_text(RECIPE)
    assert "to go on with the run in it use --resume" in problems(tmp_path)[0]
    path.write_bytes(b"name: \xff\xfe\n")
    assert "no UTF-8 text (byte 6)" in problems(path)[0]


# --- --set

def test_set_changes_values_lists_and_references(recipe):
    settings = load_recipe(recipe(), sets=[
        "train.steps=7", "rewards.0.weight=2", "rewards.1.fn=my.py:form", "algo.loss=my_ideas:soft_gate", "algo.loss.temperature=1.0",
        "tasks.source.length=5", "sampling.stop=[\"\\n\"]", "monitor.sinks.0.folder=x", "about=a = b", "algo.kl.coef=0.5",
        "model.scratch.config.layers=2",
    ])
    assert settings.train.steps == 7 and settings.sampling.stop == ("\n",) and settings.about == "a = b"
    assert [(r.fn.path, r.weight) for r in settings.rewards] == [("exact", 2.0), ("my.py:form", 1.0)]
    assert settings.algo.loss == Ref("my_ideas:soft_gate", {"temperature": 1.0})
    assert settings.tasks.source == Ref("digits", {"length": 5})
    assert settings.monitor.sinks == (Ref("tensorboard", {"folder": "x"}),)
    assert settings.algo.kl.coef == 0.5
    assert settings.model.scratch.config == {"hidden_size": 64, "layers": 2}


def test_set_below_a_default_reference_keeps_its_other_values(recipe):
    default = load_recipe(recipe()).algo.loss
    changed = load_recipe(recipe(), sets=["algo.loss.eps_high=0.28"]).algo.loss
    assert changed == Ref(default.path, {**default.values, "eps_high": 0.28}) and changed != default


def test_set_errors_name_the_set(recipe):
    told = problems(recipe(), sets=[
        "train.steps", "trian.steps=3", "train.steps=many", "train.steps.x=1", "rewards.5.fn=a", "rewards.x.fn=a", "algo.kl.place=lss",
        "about=[1", "=3",
    ])
    wanted = [
        "--set train.steps: expected section.key=value, as --set train.steps=100",
        "--set trian.steps=3: trian: there is no such setting; did you mean train? (found a section with steps)",
        "--set train.steps=many: train.steps: expected a whole number, found the text 'many'",
        "--set train.steps.x=1: train.steps is a single value (the text 'many'); nothing stands below it",
        "--set rewards.5.fn=a: rewards is a list with entries 0 to 0 (1 adds one); found '5'",
        "--set rewards.x.fn=a: rewards is a list with entries 0 to 0 (1 adds one); found 'x'",
        "--set algo.kl.place=lss: algo.kl.coef: this setting is required: 0 only measures.",
        "--set algo.kl.place=lss: algo.kl.place: expected 'reward', 'token_reward' or 'loss', found the text 'lss'; did you mean loss?",
        "--set about=[1: '[1' is no YAML value: expected ',' or ']', but got '<stream end>'",
        "--set =3: '' is no name of a setting; write section.key, as train.steps",
    ]
    assert len(told) == len(wanted) and all(a.startswith(b) for a, b in zip(sorted(told), sorted(wanted), strict=True)), told


def test_a_model_given_by_set_takes_the_place_of_the_other_kind(recipe):
    notes = []
    settings = load_recipe(recipe(), sets=["model.path=some/folder"], note=notes.append)
    assert settings.model.path == "some/folder" and settings.model.scratch is None
    assert notes == ["model.scratch of the recipe is left out, because --set model.path=some/folder gives model.path"]
    (recipe().parent / "saved.yaml").write_text(dump(settings))
    back = load_recipe("saved.yaml", sets=["model.scratch.alphabet=ab"], note=notes.append)
    assert back.model.path is None and back.model.scratch.alphabet == "ab"
    assert len(notes) == 2 and "model.path of the recipe is left out" in notes[1]
    (line,) = problems(recipe(), sets=["model.path=a", "model.scratch.alphabet=ab"], note=notes.append)
    assert "give exactly one of" in line and len(notes) == 2


def test_the_note_goes_to_stderr_by_itself(recipe, capsys):
    load_recipe(recipe(), sets=["model.path=a"])
    out = capsys.readouterr()
    assert out.out == "" and out.err.startswith("note: model.scratch of the recipe is left out")


# --- overrides from Python

def a_reward(rollout, task):
    return 1.0


def test_overrides(recipe):
    settings = load_recipe(
        recipe(), sets=["train.steps=1"], note=lambda line: None,
        overrides={"steps": 9, "lr": 1, "model": Path("folder"), "train": {"prompts_per_step": 2}, "rewards": [a_reward, {"fn": "exact"}],
                   "sampling.top_k": 5, "evaluate": {"sampling": {"max_new_tokens": 3}}, "optim": {"betas": (0.5, 0.6)}},
    )
    assert settings.train.steps == 9 and settings.optim.lr == 1.0 and settings.model.path == "folder"
    assert settings.train.prompts_per_step == 2 and settings.train.samples_per_prompt == 8
    assert [reward.fn for reward in settings.rewards] == [Ref.of(a_reward), Ref("exact")]
    assert settings.rewards[0].fn.load() is a_reward
    assert settings.sampling.top_k == 5 and settings.optim.betas == (0.5, 0.6)
    assert settings.evaluate.sampling == EvalSampling(max_new_tokens=3)


def test_override_errors_name_the_argument(recipe):
    told = problems(recipe(), overrides={"every_steps": 3, "stepz": 4, "lr": "fast", "sampling": object()})
    every, lr, sampling, stepz = sorted(told)
    assert every.endswith("in more than one section; write evaluate={'every_steps': ...} or checkpoint={'every_steps': ...}")
    assert lr == "lr='fast': optim.lr: expected a number, found the text 'fast'"
    assert sampling.startswith("sampling=<object") and "a setting is plain data" in sampling
    assert stepz == "stepz=4: stepz: there is no such setting; did you mean train.steps? (found the number 4)"


# --- dump, diff, resume

NASTY = [
    "", " lead", "trail ", "null", "True", "yes", "~", "32", "1e5", ".5", ".inf", "0x1f", "2020-01-01", "a: b", "a #b", "- a", "*a", "&a",
    "!a", "%a", "@a", "`a`", "[a", "{a", "'", '"', "\\", "\\n", "line\nline\n", "\ttab", "\r", "\x00\x07\x85\u2028\ufeff", "\u00fcmlaut",
    "\U0001f600", "<|im_end|>", "=", "<<", "a:b", "file.py:fn", "../x", "~/x", "---", "...", "a,b", "?", "\u00a0",
]


def test_dump_loads_back_equal(recipe, tmp_path):
    settings = load_recipe(
        recipe(text=RECIPE + "algo:\n  kl: {coef: 0.1, target_nats: 3}\n"),
        sets=["model.lora.targets=[a, b]", "monitor.sinks.1=my:sink", "monitor.sinks.1.x={a: [1, {b: 2}]}"],
    )
    values = {
        "text": NASTY, "number": [1e-300, 1e22, 0.1, -3, float("inf"), 5e-324, 1.0], "none": None, "deep": {"a": {"b": [[], {}]}},
        **{text or "empty": text for text in NASTY},
    }
    settings = settings.model_copy(update={
        "about": "\n".join(NASTY), "tasks": settings.tasks.model_copy(update={"source": Ref("a:b", values)}),
        "sampling": Sampling(stop=tuple(text for text in NASTY if text)),
    })
    (tmp_path / "saved.yaml").write_text(dump(settings), encoding="utf-8")
    assert load_recipe("saved.yaml") == settings
    assert diff(load_recipe("saved.yaml"), settings) == []


def test_dump_shows_every_setting_and_its_meaning(recipe):
    text = dump(load_recipe(recipe()))
    for section, info in Settings.model_fields.items():
        assert f"\n{section}:" in "\n" + text, section
        for name in getattr(info.annotation, "model_fields", {}):
            assert f"\n  {name}:" in text, (section, name)
    assert "  max_new_tokens: 128  # Most tokens the policy may write in one turn.\n" in text
    assert max(map(len, text.splitlines())) <= 140


def test_dump_is_read_alike_by_a_yaml_1_1_reader(recipe):
    yaml = pytest.importorskip("yaml")
    data = yaml.safe_load(dump(load_recipe(recipe(), sets=["name='yes'"])))
    assert data["optim"]["eps"] == 1e-8 and data["optim"]["lr"] == 1e-3 and data["name"] == "yes"


def test_diff_lists_each_changed_setting(recipe):
    old = load_recipe(recipe())
    new = load_recipe(recipe(), sets=["train.steps=7", "algo.loss.eps_high=0.3", "rewards.0.weight=2", "model.lora={}", "monitor.sinks=[]"])
    assert diff(old, old) == []
    assert diff(old, new) == [
        "model.lora: null -> {rank: 16, alpha: 32.0, dropout: 0.0, targets: all-linear}",
        "rewards.0.weight: 1.0 -> 2.0",
        "algo.loss: {ref: ppo_clip, eps_low: 0.2, eps_high: 0.2} -> {ref: ppo_clip, eps_low: 0.2, eps_high: 0.3}",
        "train.steps: 50 -> 7",
        "monitor.sinks: [tensorboard] -> []",
    ]


def test_what_may_change_on_resume(recipe):
    old = load_recipe(recipe())
    allowed = ["optim.lr=1", "optim.betas=[0.1, 0.2]", "train.steps=60", "train.max_skipped_updates=9", "train.tokens_per_micro_batch=128",
               "evaluate.every_steps=3", "checkpoint.keep=1", "monitor.sinks=[]", "expect=x", "about=y"]
    assert len(resumable_changes(old, load_recipe(recipe(), sets=allowed))) == len(allowed)
    for refused in ("seed=1", "train.samples_per_prompt=9", "engine={ref: native, slots: 3}", "evaluate.samples_per_task=2",
                    "algo.loss=reinforce", "name=z", "rewards.0.weight=3"):
        with pytest.raises(SettingsError, match=f"^{refused.split('=')[0]}: ") as caught:
            resumable_changes(old, load_recipe(recipe(), sets=[refused, "optim.lr=1"]))
        assert len(caught.value.problems) == 1 and "cannot change when a run is resumed" in str(caught.value)


# --- shipped recipes, and the weight of the package

def test_every_shipped_recipe_loads_and_tells_what_it_does():
    infos = shipped()
    assert "from-scratch-tiny" in [info.name for info in infos]
    for info in infos:
        assert isinstance(info, RecipeInfo) and info.about and info.expect, info.name
        assert load_recipe(info.name).name == info.name == info.path.stem


def test_config_imports_neither_torch_nor_transformers():
    code = (
        "import sys, burnish, burnish.config.load as load; load.shipped(); load.load_recipe('from-scratch-tiny')\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow', 'typer', 'rich'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
