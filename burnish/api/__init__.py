"""Trainer: a recipe's settings as named arguments to the parts."""

from burnish.api.session import Finished
from burnish.api.trainer import RunError, Trainer

__all__ = ["Finished", "RunError", "Trainer"]
