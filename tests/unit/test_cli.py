import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_preflight import PARTS, RECIPE
from typer.testing import CliRunner

from burnish.cli import app
from burnish.config.load import load_recipe, shipped

ROOT = Path(__file__).parents[2]

INTERRUPTS = '''
calls = 0

def count(reward):
    global calls
    calls += 1
    if calls > 4 * 3:
        raise KeyboardInterrupt
    return reward - reward.mean()

def broken(reward):
    return {}["a bug"]
'''


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*arguments) is `burnish *arguments` in a folder with tiny.yaml and my_parts.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "my_parts.py").write_text(PARTS + INTERRUPTS)
    return lambda *args: CliRunner().invoke(app, [str(a) for a in args])


def refused(result) -> str:
    assert result.exit_code == 2 and result.stdout == "", (result.exit_code, result.output)
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    return result.stderr


# --- help and what needs no torch

def test_help(run):
    bare = run()
    assert "Commands:" in bare.output
    for command in ("train", "check", "recipes", "report", "doctor"):
        assert command in bare.output
        told = run(command, "--help")
        assert told.exit_code == 0 and "Examples:" in told.output and f"    burnish {command}" in told.output


def test_version(run):
    assert run("--version").output == "burnish 0.1.0\n"


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["recipes"], ["train", "from-scratch-tiny", "--print-settings"]])
def test_no_torch_where_none_is_needed(args):
    code = (
        "import sys\nfrom burnish.cli import app\n"
        f"app({args!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules); assert not heavy, heavy"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout


def test_recipes(run):
    told = run("recipes").output
    for info in shipped():
        if info.preset and info.name.endswith("-tiny"):
            assert re.search(rf"(?<![\w-]){info.name}(,|\s|$)", told) and f"\n{info.name}\n" not in told
        else:
            assert f"{info.name}\n" in told and info.about.split()[0] in told and "expect: " in told
    some = run("recipes", "dpo").output
    assert "\ndpo-tiny\n" in f"\n{some}" and "expect: " in some and "arithmetic-grpo" not in some
    assert "no recipe has the word 'xyzzy'; `burnish recipes` lists all" in run("recipes", "xyzzy").output


def test_print_settings_is_a_recipe(run, tmp_path):
    told = run("train", "tiny.yaml", "--set", "train.steps=3", "--seed", "7", "--print-settings")
    assert told.exit_code == 0 and told.stderr == ""
    (tmp_path / "copy.yaml").write_text(told.stdout)
    assert load_recipe("copy.yaml") == load_recipe("tiny.yaml", sets=["train.steps=3", "seed=7"])
    assert run("train", "copy.yaml", "--print-settings").stdout == told.stdout
    assert not (tmp_path / "runs").exists()


# --- refusals

@pytest.mark.parametrize(("args", "told"), [
    (["train"], "which recipe?"),
    (["train", "tinyy.yaml"], "no such file: tinyy.yaml; did you mean tiny.yaml?"),
    (["train", "from-scratch-tinny"], "did you mean from-scratch-tiny?"),
    (["train", "tiny.yaml", "--set", "train.stepz=3"], "--set train.stepz=3: train.stepz: there is no such setting; did you mean train.st"),
    (["train", "tiny.yaml", "--set", "train.steps"], "expected section.key=value"),
    (["train", "tiny.yaml", "--out", "tiny.yaml"], "--out tiny.yaml: this is a file"),
    (["train", "--resume", "nowhere"], "--resume nowhere: this is no folder of a run (no such folder)"),
    (["train", "--resume", "."], "this is no folder of a run (no settings.yaml in it)"),
    (["train", "tiny.yaml", "--set", "rewards.0.fn=nowhere:f"], "rewards.0.fn: cannot import nowhere:f"),
    (["train", "tiny.yaml", "--set", "model.path=no/such/folder"], "model.path no/such/folder"),
    (["check", "tiny.yaml", "--set", "train.samples_per_prompt=1"], "every advantage would be 0"),
    (["report", "nowhere"], "nowhere holds no run"),
])
def test_refusals(run, tmp_path, args, told):
    stderr = run(*args)
    if "model.path=no/such/folder" in args:
        assert stderr.stderr.startswith("note: model.scratch of the recipe is left out")
        stderr.stderr_bytes = stderr.stderr.partition("\n")[2].encode()
    assert told in refused(stderr)
    assert not (tmp_path / "runs").exists()


def test_options_of_typer_are_refused_too(run):
    result = run("train", "tiny.yaml", "--step", "3")
    assert result.exit_code == 2 and "No such option: --step" in result.output


# --- check and doctor

def test_check(run):
    told = run("check", "tiny.yaml", "--set", "optim.lr=0")
    assert told.exit_code == 0
    assert "tasks    80 to train on, 20 held out\n" in told.output
    assert "note: optim.lr is 0: the weights stay as they are\n" in told.output
    assert told.output.endswith("nothing speaks against this run\n")


def test_doctor(run, monkeypatch, tmp_path):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    told = run("doctor")
    assert told.exit_code == 0
    lines = dict(line.split(None, 1) for line in told.output.splitlines())
    import torch

    assert lines["torch"] == torch.__version__
    assert lines["device"].startswith("cpu" if not torch.accelerator.is_available() else torch.accelerator.current_accelerator().type)
    assert lines["threads"].startswith(f"{torch.get_num_threads()} of torch")
    assert str(tmp_path / "cache") in told.output


# --- training

def test_train_resume_report(run, tmp_path):
    done = run("train", "tiny.yaml", "--set", "train.steps=2", "--out", "out")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "out"
    assert load_recipe(folder / "settings.yaml") == load_recipe("tiny.yaml", sets=["train.steps=2"])
    assert "held-out accuracy" in done.stdout and "before training" in done.stdout and "paired test" in done.stdout
    assert f"model  {Path('out') / 'model'}" in done.stdout and (folder / "model" / "config.json").is_file()

    again = refused(run("train", "tiny.yaml", "--out", "out"))
    assert "--out out: this folder already holds a run" in again and "`burnish train --resume out`" in again

    assert "seed: 0 -> 1: cannot change when a run is resumed" in refused(run("train", "--resume", "out", "--seed", "1"))
    fewer = run("train", "--resume", "out", "--set", "train.steps=1")
    assert fewer.exit_code == 2
    assert "train.steps is 1, but the run in out has already made 2 steps; give more, as --set train.steps=4" in fewer.stderr
    assert "--out x and --resume out do not go together" in refused(run("train", "--resume", "out", "--out", "x"))
    more = run("train", "tiny.yaml", "--resume", "out", "--set", "train.steps=4", "--set", "optim.lr=1e-4")
    assert more.exit_code == 0, more.output
    assert more.stderr.splitlines() == [
        "note: tiny.yaml is not read, because --resume takes the settings of the run in out",
        "changed: train.steps: 2 -> 4", "changed: optim.lr: 1.0e-05 -> 0.0001",
    ]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]

    (folder / "report.html").unlink()
    assert run("report", "out").stdout.strip() == str(Path("out") / "report.html")
    assert (folder / "report.html").stat().st_size > 10_000


def test_interrupt_tells_how_to_go_on_and_the_next_run_gets_its_own_folder(run, tmp_path):
    sets = ["--set", "algo.advantage=my_parts.py:count", "--set", "checkpoint.every_steps=2", "--set", "tasks.held_out=0"]
    stopped = run("train", "tiny.yaml", *sets)
    assert stopped.exit_code == 130, stopped.output
    last = Path("runs") / "tiny" / "checkpoints" / "step-000002"
    assert f"The last checkpoint is {last}. Go on with: burnish train --resume {Path('runs') / 'tiny'}" in stopped.stderr
    assert "Traceback" not in stopped.output
    at_once = run("train", "tiny.yaml", *sets)
    assert "No checkpoint was written yet" in at_once.stderr and (tmp_path / "runs" / "tiny-2" / "settings.yaml").is_file()


def test_a_bug_keeps_its_traceback(run):
    result = run("train", "tiny.yaml", "--set", "algo.advantage=my_parts.py:broken", "--set", "tasks.held_out=0")
    assert isinstance(result.exception, KeyError) and "error:" not in result.stderr


def test_python_m_burnish():
    ran = subprocess.run([sys.executable, "-m", "burnish", "--version"], check=True, cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == "burnish 0.1.0\n"
