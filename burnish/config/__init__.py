"""Settings of a run. Frozen, strict, one default each; imports no torch."""

from burnish.config.settings import (
    Algo,
    Checkpoint,
    EvalSampling,
    Evaluate,
    Kl,
    Lora,
    Model,
    Monitor,
    Optim,
    Reward,
    Sampling,
    Scratch,
    Settings,
    Tasks,
    Train,
)

__all__ = [
    "Algo", "Checkpoint", "EvalSampling", "Evaluate", "Kl", "Lora", "Model", "Monitor", "Optim", "Reward", "Sampling", "Scratch",
    "Settings", "Tasks", "Train",
]
