"""Loops: the order in which the parts are called."""

from burnish.loops.answers import AnswersRecord, answers
from burnish.loops.sync import StepRecord, sync

__all__ = ["AnswersRecord", "StepRecord", "answers", "sync"]
