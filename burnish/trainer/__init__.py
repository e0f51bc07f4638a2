"""The trainer step: rows, per-token columns and an objective in, moved weights and metrics out. Knows no method by name."""

from burnish.trainer.algorithm import Algorithm, Correction, EntropyTerm, KlTerm, ValueTerm
from burnish.trainer.columns import COLUMNS, Against, micro_batches
from burnish.trainer.objective import Counts, Objective, ShapeError
from burnish.trainer.optim import schedule
from burnish.trainer.reference import Reference, Teachers
from burnish.trainer.state import TrainState, make_state
from burnish.trainer.step import NonFiniteError, NothingMovedError, train_step
from burnish.trainer.values import ValueObjective, values_of

__all__ = [
    "COLUMNS", "Against", "Algorithm", "Correction", "Counts", "EntropyTerm", "KlTerm", "NonFiniteError", "NothingMovedError",
    "Objective", "Reference", "ShapeError", "Teachers", "TrainState", "ValueObjective", "ValueTerm", "make_state", "micro_batches",
    "schedule", "train_step", "values_of",
]
