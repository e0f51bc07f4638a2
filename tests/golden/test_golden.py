"""Golden vectors: numbers worked out in float64 from the papers' formulas, against the library's public functions.

Values at masked positions are garbage on purpose. BURNISH_GOLDEN names another folder with the same schema.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import golden_advantages
import golden_policy
import golden_preference
import golden_rewards
import golden_tokens
import pytest
import torch

FOLDER = Path(os.environ.get("BURNISH_GOLDEN", Path(__file__).parent))
FILES = sorted(FOLDER.glob("*.json"))


ADAPTERS = {
    name: fn
    for family in (golden_advantages, golden_policy, golden_preference, golden_rewards, golden_tokens)
    for name, fn in family.ADAPTERS.items()
}
DIAGNOSTIC = {"wrong_mean_of_micro_batch_means"}   # what a wrong reduction would give


def test_there_are_vectors():
    assert FILES, f"no golden vectors in {FOLDER}"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_golden(path, dtype):
    case = json.loads(path.read_text())
    assert case["algorithm"] in ADAPTERS, f"no adapter for {case['algorithm']}"
    got = ADAPTERS[case["algorithm"]](case["settings"], case["inputs"], getattr(torch, dtype))
    tolerance = case["tolerance"][dtype]
    for key, expected in case["expected"].items():
        if key in DIAGNOSTIC:
            continue
        _close(got[key], expected, key, tolerance)


def _close(got, expected, key, tolerance):
    if isinstance(expected, dict):
        for name, inner in expected.items():
            _close(got[name], inner, f"{key}.{name}", tolerance)
        return
    if isinstance(expected, list) and expected and isinstance(expected[0], list):   # rows may differ in length
        assert len(got) == len(expected), f"{key} has {len(got)} rows, not {len(expected)}"
        for i, inner in enumerate(expected):
            _close(got[i], inner, f"{key}[{i}]", tolerance)
        return
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(torch.as_tensor(got).double(), wanted, **tolerance, msg=lambda m: f"{key}: {m}")
