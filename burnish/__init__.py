"""burnish: reinforcement-learning post-training of language models. Importing it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Trainer", "recipes"]

if TYPE_CHECKING:
    from burnish.api import Trainer
    from burnish.config.load import shipped as recipes


def __getattr__(name: str) -> Any:
    """`Trainer` runs a recipe; `recipes()` lists the shipped ones. Each is imported when it is first asked for."""
    if name == "Trainer":
        from burnish.api import Trainer as value
    elif name == "recipes":
        from burnish.config.load import shipped as value
    else:
        raise AttributeError(f"module 'burnish' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
