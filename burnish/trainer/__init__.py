"""The trainer step: rows, per-token columns and an objective in, moved weights and metrics out. Knows no method by name."""

from burnish.trainer.algorithm import Algorithm, Correction, EntropyTerm, KlTerm, ValueTerm
from burnish.trainer.columns import COLUMNS, Against, micro_batches
from burnish.trainer.objective import Counts, Objective, ShapeError
from burnish.trainer.optim import schedule
from burnish.trainer.pairs import PAIR_COLUMNS, SINGLE_COLUMNS, LossTerm, PairObjective, SingleObjective
from burnish.trainer.reference import Reference, Teachers
from burnish.trainer.scores import ClassScores, PairScores, RatedScores, StepScores, measure_scores
from burnish.trainer.state import TrainState, make_state
from burnish.trainer.step import NonFiniteError, NothingMovedError, train_step
from burnish.trainer.tokens import DivergenceObjective, TokenObjective, against_teachers, token_means
from burnish.trainer.values import ValueObjective, values_of

__all__ = [
    "COLUMNS", "PAIR_COLUMNS", "SINGLE_COLUMNS", "Against", "Algorithm", "ClassScores", "Correction", "Counts", "DivergenceObjective",
    "EntropyTerm", "KlTerm", "LossTerm", "NonFiniteError", "NothingMovedError", "Objective", "PairObjective", "PairScores", "RatedScores",
    "Reference", "ShapeError", "SingleObjective", "StepScores", "Teachers", "TokenObjective", "TrainState", "ValueObjective", "ValueTerm",
    "against_teachers", "make_state", "measure_scores", "micro_batches", "schedule", "token_means", "train_step", "values_of",
]
