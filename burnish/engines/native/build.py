"""The compiled step: built once from step.cpp by the machine's own compiler, kept in the cache folder, loaded by ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

SOURCE = Path(__file__).with_name("step.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread")
NEEDS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")


class NotBuilt(RuntimeError):
    """Why there is no compiled step on this machine; sampling goes through torch then."""


def library() -> ctypes.CDLL:
    """The library, built where it is not in the cache yet (about fifteen seconds). Raises NotBuilt with the reason, found once."""
    found = _found()
    if isinstance(found, NotBuilt):
        raise found
    return found


@functools.cache
def _found() -> ctypes.CDLL | NotBuilt:
    try:
        return _built()
    except NotBuilt as error:
        return error


def _built() -> ctypes.CDLL:
    if os.environ.get("BURNISH_NO_COMPILE"):
        raise NotBuilt("BURNISH_NO_COMPILE is set")
    flags = cpu_flags()
    if missing := [name for name in NEEDS if name not in flags]:
        raise NotBuilt(f"this processor has no {missing[0]}")
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise NotBuilt("there is no C++ compiler (c++, g++ or clang++) on the PATH")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    digest = hashlib.blake2b("\0".join([SOURCE.read_text(), version, *FLAGS, *sorted(flags)]).encode(), digest_size=8).hexdigest()
    folder = Path(os.environ.get("BURNISH_CACHE") or Path.home() / ".cache" / "burnish")
    file = folder / f"step-{digest}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"step-{digest}.lock"):
            if not _is_whole(file):              # loading a damaged one would end the process without a word
                print(f"building the compiled step of the sampler with {compiler}, once: about 15 seconds", file=sys.stderr, flush=True)
                _compile(compiler, file)
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise NotBuilt(f"the compiled step cannot be kept or loaded in {folder}: {error}") from error


def cpu_flags() -> frozenset[str]:
    """What the processor can do, by Linux's names; empty elsewhere."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def _compile(compiler: str, file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            line = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise NotBuilt(f"{compiler} cannot build the compiled step: {line}")
        _sum_of(file).write_text(_digest(made))
        made.replace(file)


def _is_whole(file: Path) -> bool:
    kept = _sum_of(file)
    return file.is_file() and kept.is_file() and kept.read_text() == _digest(file)


def _sum_of(file: Path) -> Path:
    return file.with_suffix(".sum")


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
