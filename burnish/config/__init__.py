"""Settings of a run. Frozen, strict, one default each; imports no torch."""

from burnish.config.settings import (
    Algo,
    Checkpoint,
    Constraint,
    Correction,
    Critic,
    Data,
    Distill,
    Entropy,
    Environment,
    EvalSampling,
    Evaluate,
    Kl,
    Lora,
    Model,
    Monitor,
    Optim,
    Preference,
    Reward,
    RewardModel,
    Sampling,
    Scratch,
    Settings,
    Sft,
    Tasks,
    Teacher,
    Term,
    Train,
)

__all__ = [
    "Algo", "Checkpoint", "Constraint", "Correction", "Critic", "Data", "Distill", "Entropy", "Environment", "EvalSampling",
    "Evaluate", "Kl", "Lora", "Model", "Monitor", "Optim", "Preference", "Reward", "RewardModel", "Sampling", "Scratch",
    "Settings", "Sft", "Tasks", "Teacher", "Term", "Train",
]
