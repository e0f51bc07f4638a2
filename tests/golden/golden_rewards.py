"""Golden adapters of reward models, ensembles and running normalisation, best of n."""

from __future__ import annotations

ADAPTERS = {}
