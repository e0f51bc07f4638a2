"""The compiled step's library: built once, damaged ones built anew, a failure told once and with its reason."""

from __future__ import annotations

import ctypes

import pytest
from parts import can_compile

from burnish.engines.native import build

compiled = pytest.mark.skipif(not can_compile(), reason="no compiled step on this machine")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache folder of its own, and nothing remembered."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    build._found.cache_clear()
    yield tmp_path
    build._found.cache_clear()


@compiled
@pytest.mark.slow
def test_a_damaged_library_is_built_anew(fresh, capfd):
    build.library()
    (file,) = fresh.glob("step-*.so")
    whole = file.read_bytes()
    for damaged in (whole[:3000], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.unlink()                            # the loaded one stays mapped
        file.write_bytes(damaged)
        build._found.cache_clear()
        assert isinstance(build.library(), ctypes.CDLL)
        assert build._is_whole(file)
    assert capfd.readouterr().err.count("building the compiled step") == 4


@compiled
def test_why_there_is_none(fresh, monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    for _ in range(2):
        with pytest.raises(build.NotBuilt, match="no C\\+\\+ compiler"):
            build.library()
    build._found.cache_clear()
    monkeypatch.setenv("BURNISH_NO_COMPILE", "1")
    with pytest.raises(build.NotBuilt, match="BURNISH_NO_COMPILE is set"):
        build.library()


@compiled
def test_a_compiler_that_fails_is_asked_once(fresh, monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\necho 'step.cpp:1: error: no' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build.shutil, "which", lambda name: str(compiler))
    for _ in range(3):
        with pytest.raises(build.NotBuilt, match=r"cannot build the compiled step: step\.cpp:1: error: no"):
            build.library()
    assert (tmp_path / "asked").read_text().count("asked") == 2      # its version, and the build
    assert not list(tmp_path.glob("*.so"))
