"""What is said of a run that can work: its facts, and notes on what may not have been meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from burnish.config import EvalSampling, Settings
from burnish.config.settings import METHODS
from burnish.data.tasks import Split
from burnish.models.load import Facts
from burnish.plan.references import algos
from burnish.ref import Ref
from burnish.types import Pair, Rated


def notes_of(s: Settings, tasks: Mapping[str, Split], answers: Split | None) -> Iterator[str]:
    updates = num_updates(s)
    if s.optim.lr == 0:
        yield "optim.lr is 0: the weights stay as they are"
    if s.optim.warmup_updates >= updates:
        warmup = s.optim.warmup_updates
        yield f"optim.warmup_updates is {warmup}, and the run makes {updates} updates: the learning rate rises to the end"
    if s.critic is not None and s.critic.kind == "model" and 0 < s.critic.warmup_steps < s.train.steps:
        frozen = s.critic.warmup_steps * s.train.epochs * s.train.minibatches
        if s.optim.warmup_updates <= frozen:
            yield (
                f"optim.warmup_updates is {s.optim.warmup_updates}, and the policy stands still for the first {frozen} updates "
                "(critic.warmup_steps): it begins at the whole learning rate"
            )
    if any(a.prox == "interpolated" for _, a, *_ in algos(s)) and s.loop == "sync":
        yield "algo.prox interpolated is the sampler itself in loop: sync, where every rollout has the version that the step began with"
    if s.sampling.temperature < 0.5:
        yield f"sampling.temperature is {s.sampling.temperature}: samples of one prompt will be much alike, and equal rewards teach nothing"
    if s.train.samples_per_prompt == 2:
        yield "train.samples_per_prompt is 2: where rewards are 0 or 1, at least half of the groups have equal rewards and teach nothing"
    for name, one in tasks.items():
        place = f"environments {name}: " if name else ""
        if one.num_duplicates:
            yield f"{place}{one.num_duplicates} tasks have the prompt of another and are left out"
        if not one.held_out:
            yield f"{place}tasks.held_out is 0: nothing is measured on tasks that were not trained on"
    if any(one.held_out for one in tasks.values()):
        yield from _evaluation_notes(s)
    if s.critic is not None and s.critic.warmup_steps >= s.train.steps:
        yield f"critic.warmup_steps is {s.critic.warmup_steps}, and the run has {s.train.steps} steps: the policy learns in none of them"
    yield from _answer_notes(answers)


def _answer_notes(answers: Split | None) -> Iterator[str]:
    if answers is not None and answers.num_asked:
        yield f"{answers.num_asked} entries of data have the prompt of a held-out task and are not trained on"
    if answers is not None and answers.num_duplicates:
        yield f"{answers.num_duplicates} entries of data stand there twice and are left out"
    if answers is not None and not answers.held_out:
        yield "data.held_out is 0: nothing is measured on answers that were not trained on"


def _evaluation_notes(s: Settings) -> Iterator[str]:
    e, differ = s.evaluate, []
    if e.every_steps > s.train.steps:
        yield f"evaluate.every_steps is {e.every_steps}, but the run has {s.train.steps} steps: it is evaluated before and after only"
    if e.samples_per_task > 1 and (e.sampling.temperature == 0 or e.sampling.top_k == 1):
        count = e.samples_per_task
        yield f"evaluate.samples_per_task is {count}, but evaluate.sampling takes the most probable token: all samples are the same"
    for name in EvalSampling.model_fields if s.samples else ():
        if name in ("max_new_tokens", "stop", "end_tokens") and getattr(s.sampling, name) != getattr(e.sampling, name):
            differ.append(name)
    if differ:
        yield f"evaluate.sampling and sampling differ in {', '.join(differ)}: held-out answers end elsewhere than trained ones"


def num_updates(s: Settings) -> int:
    return s.train.steps * s.train.epochs * s.train.minibatches


def facts_of(s: Settings, tasks: Mapping[str, Split], answers: Split | None, model: Facts) -> Iterator[str]:
    n = model.num_parameters
    size = f", {n / 1e6:.1f} million parameters" if n and n >= 1e5 else f", {n:,} parameters" if n else ""
    yield f"model    {model.source}{size}, context {model.context_tokens} tokens"
    yield f"method   {_method(s)}"
    t = s.train
    for name, one in tasks.items():
        if s.loop == "sync":
            yield f"tasks    {len(one.train)} to train on, {len(one.held_out)} held out" + (f" ({name})" if name else "")
        else:
            yield f"tasks    {len(one.held_out)} to evaluate on"
    if answers is not None:
        yield f"data     {len(answers.train)} to train on, {len(answers.held_out)} held out"
        what = {Pair: "pairs", Rated: "rated answers"}.get(type(answers.train[0]), "answers")
        yield f"run      {t.steps} steps of {t.examples_per_step} {what}, {num_updates(s)} updates, " + (
            f"{t.steps * t.examples_per_step / len(answers.train):.1f} passes over the data"
        )
        return
    passes = t.steps * t.prompts_per_step / sum(len(one.train) for one in tasks.values())
    yield (
        f"run      {t.steps} steps of {t.prompts_per_step} prompts x {t.samples_per_prompt} samples, {num_updates(s)} updates, "
        f"{passes:.1f} passes over the tasks"
    )


def _method(s: Settings) -> str:
    """The functions of the method and the models beside the policy, in one line."""
    name = s.preset or next((n.replace("_", " ") for n in METHODS[1:] if s.algo is None and getattr(s, n) is not None), "")
    parts: list[Ref | None] = []
    if s.algo is not None:
        parts = [s.algo.advantage, s.algo.loss, s.algo.reduce]
    elif s.sft is not None:
        parts = [s.sft.loss, s.sft.reduce]
    elif s.preference is not None:
        parts = [term.fn for term in s.preference.losses]
    elif s.reward_model is not None:
        parts = [s.reward_model.loss]
    elif s.distill is not None:
        parts = [s.distill.divergence, s.distill.reduce]
    what = ", ".join(ref.path.rpartition(":")[2] for ref in parts if ref is not None)
    beside = [f"environment {e.name} has its own" for e in s.environments if e.algo is not None]
    if s.algo is not None and any(a.kl is not None for a in (s.algo, *(e.algo or s.algo for e in s.environments))):
        beside.append("a KL to the start")
    if s.critic is not None:
        beside.append("a critic of its own" if s.critic.kind == "model" else "a critic as a head")
    if s.distill is not None:
        beside.append("a teacher" if len(s.distill.teachers) == 1 else f"{len(s.distill.teachers)} teachers")
    if s.constraint is not None:
        beside.append("a constraint")
    return (f"{name}: " if name else "") + "; ".join([what, *beside])
