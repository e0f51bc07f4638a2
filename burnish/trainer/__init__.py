"""The trainer step: packed rows, per-token columns and a loss function in, moved weights and metrics out. Knows no algorithm."""

from burnish.trainer.columns import COLUMNS, micro_batches
from burnish.trainer.optim import schedule
from burnish.trainer.reference import Reference
from burnish.trainer.state import TrainState, make_state
from burnish.trainer.step import Algorithm, NonFiniteError, NothingMovedError, train_step

__all__ = [
    "COLUMNS", "Algorithm", "NonFiniteError", "NothingMovedError", "Reference", "TrainState", "make_state", "micro_batches", "schedule",
    "train_step",
]
