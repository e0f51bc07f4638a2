"""The README's Python runs as it stands, in order, each block in the same folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:<!-- (file|run): ?([^ ]*) -->\n)?```(\w+)\n(.*?)```", re.S)


def blocks() -> list[tuple[str, str, str, str]]:
    """(what to do, file name, language, text)"""
    return [m.groups("") for m in BLOCK.finditer((ROOT / "README.md").read_text())]


def test_the_readme_has_something_to_run():
    assert sum(kind == "run" for kind, *_ in blocks()) >= 2
    assert all(language != "python" or kind for kind, _, language, _ in blocks()), "a Python block that no test runs"


def test_the_blocks_run(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}"}
    for kind, name, language, text in blocks():
        if kind == "file":
            (tmp_path / name).write_text(text)
        elif kind == "run":
            shell = text.replace("burnish ", f"{sys.executable} -m burnish ")
            command = [sys.executable, "-c", text] if language == "python" else ["bash", "-ec", shell]
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300)
            assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)", (ROOT / "README.md").read_text()))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
