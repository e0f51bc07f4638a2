"""Wrong input on the command line: refused before any weight is loaded, with what was found and what would work."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import burnish.api.trainer
from burnish.cli import app

RECIPE = """\
name: mine
model: {scratch: {alphabet: "0123456789>", config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2,
  num_key_value_heads: 2, max_position_embeddings: 16}}}
tasks: {source: {ref: copy_digits, length: 2}, held_out: 10}
rewards: [{fn: exact}]
sampling: {max_new_tokens: 2}
evaluate: {sampling: {max_new_tokens: 2}}
train: {steps: 2, prompts_per_step: 4, samples_per_prompt: 4}
monitor: {sinks: []}
"""

CASES = {
    "typo in the recipe": (
        ("max_new_tokens: 2}\nevaluate", "max_new_tokns: 2}\nevaluate"), [], ["mine.yaml", "line 6", "max_new_tokns", "max_new_tokens"],
    ),
    "typo in --set": (None, ["train.stepps=3"], ["--set", "train.stepps", "steps"]),
    "wrong type": (("steps: 2,", "steps: many,"), [], ["line 8", "train.steps", "many"]),
    "missing model folder": (None, ["model.path=/no/such/folder"], ["/no/such/folder"]),
    "truncated GGUF": (None, ["model.path=TMP/broken.gguf"], ["broken.gguf"]),
    "a reward that does not import": (None, ["rewards.0.fn=no_such_module:score"], ["no_such_module", "rewards"]),
    "a reward that is not there": (None, ["rewards.0.fn=exactt"], ["exactt", "exact"]),
    "a reward with other arguments": (None, ["rewards.0.fn=TMP/mine.py:wrong"], ["mine.py:wrong", "completion"]),
    "an empty task set": (None, ["tasks.source=TMP/mine.py:nothing"], ["tasks"]),
    "fewer tasks than held out": (None, ["tasks.held_out=1000"], ["1000", "100"]),
    "one sample with a group baseline": (None, ["train.samples_per_prompt=1"], ["samples_per_prompt", "standardize"]),
    "more tokens than the context": (None, ["sampling.max_new_tokens=16"], ["max_new_tokens", "16"]),
    "prompt and tokens beyond the context": (None, ["sampling.max_new_tokens=14"], ["max_new_tokens", "16"]),
    "nothing to explore": (None, ["sampling.temperature=0"], ["sampling.temperature", "1.0"]),
    "an end token that is none": (None, ["sampling.end_tokens=[xyz]"], ["xyz"]),
    "a loss that asks for what is not there": (None, ["algo.loss=TMP/mine.py:loss"], ["values"]),
    "no recipe": ("none", [], ["from-scratch-tiny"]),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_with_a_text_that_helps(case, tmp_path, monkeypatch):
    change, sets, told = CASES[case]
    (tmp_path / "mine.yaml").write_text(RECIPE.replace(*change) if isinstance(change, tuple) else RECIPE)
    assert not isinstance(change, tuple) or change[0] in RECIPE
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x05" * 40)
    (tmp_path / "mine.py").write_text(
        "def wrong(completion): return 1.0\ndef nothing(): return []\ndef loss(logp_cur, values): return logp_cur\n"
    )
    monkeypatch.setattr(burnish.api.trainer, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    recipe = "from-scratch-tny" if change == "none" else str(tmp_path / "mine.yaml")
    args = [part for text in sets for part in ("--set", text.replace("TMP", str(tmp_path)))]
    done = CliRunner().invoke(app, ["train", recipe, "--out", str(tmp_path / "run"), *args])
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    for word in told:
        assert word in done.output, done.output
    assert not (tmp_path / "run").exists()
