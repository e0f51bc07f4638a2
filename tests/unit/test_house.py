"""The house: rooms import only rooms above them, one idea has one word, nothing asks for one maker's device."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "burnish"
ORDER = (
    "types", "ref", "config", "algorithms", "data", "chat", "models", "engines", "envs", "rewards", "rollout", "trainer", "loops",
    "checkpoint", "evaluate", "monitor", "plan", "api", "cli",
)
FILES = sorted(PACKAGE.rglob("*.py"))
BANNED = re.compile(
    r"\b(old_log_?probs?|prev_log_?probs?|logp_old|logp_new|logp_prev|rollout_log_?probs?|num_generations|train_batch_size|n_samples_per_prompt)\b"
)
WORDS_OF_OTHERS = {"config/errors.py"}      # maps the settings' names of other frameworks to ours


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("burnish"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("burnish.")}
    return found & set(ORDER)


def test_every_room_has_its_place():
    assert {room_of(f) for f in FILES} - {"__init__", "__main__"} == set(ORDER)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_rooms_import_only_rooms_above_them(file):
    room = room_of(file)
    if room in ORDER:
        assert {r for r in imports(file) if ORDER.index(r) > ORDER.index(room)} == set()


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_one_idea_has_one_word_and_no_device_is_named(file):
    text = file.read_text()
    assert ".cuda(" not in text
    if str(file.relative_to(PACKAGE)) not in WORDS_OF_OTHERS:
        assert BANNED.findall(text) == []


def test_there_is_one_backward():
    assert [f.name for f in FILES if ".backward()" in re.sub(r"`[^`]*`|\"\"\".*?\"\"\"", "", f.read_text(), flags=re.S)] == ["step.py"]
