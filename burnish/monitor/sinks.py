"""Where metrics go besides metrics.jsonl. A sink imports its library when it starts, and says early when it is missing."""

from __future__ import annotations

import importlib.util
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol


class SinkError(ValueError):
    """A sink whose library is not installed."""


class Sink(Protocol):
    """Receives the rows of a run. `resume_step` is the last step that counts when a run continues, None for a new one."""

    def start(self, run_dir: Path, settings: Mapping[str, Any], resume_step: int | None = None) -> None: ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def tensorboard() -> Sink:
    """Event files under RUN/tensorboard; look at them with `tensorboard --logdir RUN/tensorboard`."""
    return TensorBoard()


def wandb(project: str = "burnish", entity: str | None = None, mode: str | None = None) -> Sink:
    """Weights & Biases. mode: "online", "offline" or "disabled"; none: what WANDB_MODE says."""
    return Wandb(project, entity, mode)


def mlflow(tracking_uri: str | None = None, experiment: str = "burnish") -> Sink:
    """MLflow. tracking_uri: none takes MLFLOW_TRACKING_URI."""
    return Mlflow(tracking_uri, experiment)


def trackio(project: str = "burnish", space_id: str | None = None) -> Sink:
    """trackio: a database on this machine, or on the Hugging Face Space `space_id`."""
    return Trackio(project, space_id)


class TensorBoard:
    def __init__(self) -> None:
        _require("tensorboard", "tensorboard")

    def start(self, run_dir: Path, settings: Mapping[str, Any], resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)
        lines = json.dumps(dict(settings), indent=2, default=str).splitlines()
        self._writer.add_text("settings", "\n".join(f"    {line}" for line in lines))   # indented: Markdown's code

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Steps are a metric of their own here, since W&B's own step counter refuses to go back when a run resumes."""

    def __init__(self, project: str, entity: str | None, mode: str | None) -> None:
        _require("wandb", "wandb")
        self._init = {"project": project, "entity": entity, "mode": mode}

    def start(self, run_dir: Path, settings: Mapping[str, Any], resume_step: int | None = None) -> None:
        run_id = _remember(run_dir, "wandb", lambda: uuid.uuid4().hex[:12], resume_step)
        name = settings.get("name", run_dir.name)
        self._run = _library("wandb").init(
            id=run_id, resume="allow", name=name, dir=str(run_dir), config=dict(settings), **self._init
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, tracking_uri: str | None, experiment: str) -> None:
        _require("mlflow", "mlflow")
        self._tracking_uri, self._experiment = tracking_uri, experiment

    def start(self, run_dir: Path, settings: Mapping[str, Any], resume_step: int | None = None) -> None:
        self._client = _library("mlflow").MlflowClient(self._tracking_uri)
        self._run_id = _remember(run_dir, "mlflow", lambda: self._create(run_dir, settings), resume_step)
        self._client.update_run(self._run_id, status="RUNNING")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _create(self, run_dir: Path, settings: Mapping[str, Any]) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        run = self._client.create_run(experiment, run_name=settings.get("name", run_dir.name))
        for name, value in _flat(settings):
            self._client.log_param(run.info.run_id, name, str(value)[:500])
        return run.info.run_id


class Trackio:
    def __init__(self, project: str, space_id: str | None) -> None:
        _require("trackio", "trackio")
        self._project, self._space_id = project, space_id

    def start(self, run_dir: Path, settings: Mapping[str, Any], resume_step: int | None = None) -> None:
        default = f"{settings.get('name', run_dir.name)}-{uuid.uuid4().hex[:6]}"
        name = _remember(run_dir, "trackio", lambda: default, resume_step)
        self._run = _library("trackio").init(
            project=self._project, name=name, space_id=self._space_id, config=dict(settings), resume="allow"
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise SinkError(
            f"the sink {extra} needs a library that is not installed: pip install burnish[{extra}], or remove {extra} from monitor.sinks"
        )


def _library(module: str) -> ModuleType:
    return importlib.import_module(module)


def _remember(run_dir: Path, sink: str, make: Any, resume_step: int | None) -> str:
    """The service's name for this run, kept in RUN/sinks.json so that a resumed run goes on with the same curves."""
    path = run_dir / "sinks.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    if resume_step is None or sink not in known:
        known[sink] = make()
        path.write_text(json.dumps(known))
    return known[sink]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
