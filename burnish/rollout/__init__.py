"""Rollouts: task x environment x engine x reward -> groups; what is kept; the batch."""

from burnish.rollout.batch import assemble
from burnish.rollout.keep import Kept, keep
from burnish.rollout.run import Visit, run_group, run_groups
from burnish.rollout.summary import summarize

__all__ = ["Kept", "Visit", "assemble", "keep", "run_group", "run_groups", "summarize"]
