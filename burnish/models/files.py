"""What writing and reading model folders shares."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging


def share(folder: Path) -> None:
    """Give the weights the access rights of config.json; safetensors writes them readable by their owner alone."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of transformers."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
