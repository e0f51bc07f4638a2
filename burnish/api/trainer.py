"""Trainer: from settings to a finished run. It puts the parts together; everything it calls stands alone as a library."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from burnish import checkpoint
from burnish.api.methods import kind_of, load_model, make_method
from burnish.api.session import Finished, NoRewardError, Session
from burnish.checkpoint.claim import FolderError, hold, holds_run
from burnish.config import Settings
from burnish.config.load import dump, load_recipe, resumable_changes
from burnish.monitor.report import write_report
from burnish.monitor.writer import read_metrics, write_atomic
from burnish.plan.preflight import examine
from burnish.rewards.call import stop_in_worker
from burnish.trainer import NonFiniteError, NothingMovedError


class RunError(RuntimeError):
    """A run that had to stop. The text says why, and how to go on."""


STOPS = (NonFiniteError, NothingMovedError, NoRewardError, OSError, SafetensorError, checkpoint.CheckpointError)
"""What ends a run with a text for people and a way to go on."""


class Trainer:
    """One run of one recipe.

    out: the run's folder, runs/NAME by default; it must not hold a run yet. resume: the folder of a run to go on with.
    """

    def __init__(self, settings: Settings, *, out: str | Path | None = None, resume: str | Path | None = None) -> None:
        self.settings = settings
        self.resuming = resume is not None
        self.folder = Path(resume if resume is not None else out if out is not None else Path("runs") / settings.name)

    @classmethod
    def from_recipe(
        cls, recipe: str | Path, *, model: str | None = None, out: str | Path | None = None, resume: str | Path | None = None,
        **settings: Any,
    ) -> Trainer:
        """A shipped recipe by name, or a YAML file. Other arguments are settings by name: steps=50, lr=1e-5, or
        **{"tasks.held_out": 100}; `model` is short for model.path.
        """
        if model is not None:
            settings = {"model.path": str(model), **settings}
        return cls(load_recipe(recipe, overrides=settings), out=out, resume=resume)

    def run(self) -> Finished:
        """Train, evaluate, and leave a model that plain transformers loads. Raises before any weight is loaded where the
        settings cannot work, and RunError where the run had to stop.
        """
        stop_in_worker()
        checked = examine(self.settings)
        with self._claimed():
            try:
                with Session(
                    self.settings, self.folder, checked, resuming=self.resuming, load=load_model, make_method=make_method,
                    kind=kind_of(self.settings),
                ) as session:
                    for note in checked.notes:
                        session.live.note(f"note: {note}")
                    finished = session.run()
                write_report(self.folder)
                return finished
            except BaseException as error:
                with contextlib.suppress(Exception):     # a page about what there is; the error that ended the run is what counts
                    write_report(self.folder)
                if isinstance(error, checkpoint.DamagedError):
                    raise RunError(str(error)) from error         # tells itself what is left
                if isinstance(error, STOPS):
                    raise RunError(f"{error}\n{self._how_to_go_on()}") from error
                raise

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        """The folder, looked at and held, with the settings in it. FolderError or SettingsError where it cannot be used."""
        saved = self.folder / "settings.yaml"
        if self.resuming and not saved.is_file():
            raise FolderError(f"{self.folder} holds no run to resume: there is no settings.yaml in it")
        with hold(self.folder):
            if self.resuming:
                resumable_changes(load_recipe(saved), self.settings)
                last = checkpoint.newest(self.folder / "checkpoints")
                rows = read_metrics(self.folder)
                if last is None and rows and rows[-1]["step"] > self.settings.checkpoint.every_steps:
                    raise FolderError(
                        f"{self.folder} has metrics up to step {rows[-1]['step']} but no whole checkpoint, so resuming would begin anew "
                        f"and remove them; bring {self.folder / 'checkpoints'} back, or start a run in another folder"
                    )
                if last and last.step > self.settings.train.steps:
                    raise FolderError(f"{self.folder} has made {last.step} steps already; set train.steps to more to go on")
            elif holds_run(self.folder):
                how = f"go on with it by resume={str(self.folder)!r} (--resume), or choose another out"
                raise FolderError(f"{self.folder} already holds a run; {how}")
            try:
                write_atomic(saved, dump(self.settings).encode())
            except OSError as error:
                raise FolderError(f"cannot write to {saved}: {error.strerror}; choose another folder with out (--out)") from error
            yield

    def _how_to_go_on(self) -> str:
        last = checkpoint.newest(self.folder / "checkpoints")
        if last is None:
            return "no checkpoint was written yet"
        return f"the newest checkpoint, with finite weights, is {last.folder}; go on from it with: burnish train --resume {self.folder}"
