"""Golden adapters of supervised fine-tuning and distillation."""

from __future__ import annotations

ADAPTERS = {}
