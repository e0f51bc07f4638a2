"""Golden adapters of the preference losses."""

from __future__ import annotations

ADAPTERS = {}
