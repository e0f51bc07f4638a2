"""Loops: the order in which the parts are called."""

from burnish.loops.sync import StepRecord, sync

__all__ = ["StepRecord", "sync"]
