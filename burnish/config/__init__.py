"""Settings of a run. Frozen, strict, one default each; imports no torch."""

from burnish.config.methods import (
    Algo,
    Constraint,
    Correction,
    Critic,
    Distill,
    Entropy,
    Kl,
    Preference,
    RewardModel,
    Sft,
    Teacher,
    Term,
)
from burnish.config.parts import (
    Checkpoint,
    Data,
    EvalSampling,
    Evaluate,
    Lora,
    Model,
    Monitor,
    Optim,
    Reward,
    Sampling,
    Scratch,
    Tasks,
    Train,
)
from burnish.config.settings import Environment, Settings

__all__ = [
    "Algo", "Checkpoint", "Constraint", "Correction", "Critic", "Data", "Distill", "Entropy", "Environment", "EvalSampling",
    "Evaluate", "Kl", "Lora", "Model", "Monitor", "Optim", "Preference", "Reward", "RewardModel", "Sampling", "Scratch",
    "Settings", "Sft", "Tasks", "Teacher", "Term", "Train",
]
