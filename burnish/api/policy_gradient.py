"""Learn from rollouts by a policy gradient: advantages, the objective, its controllers, the critic, the constraint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms.constraint import PidMultiplier
from burnish.algorithms.penalties import ESTIMATORS, EntropyController, KlController, exact_kl
from burnish.algorithms.returns import EmaBaseline
from burnish.api.session import Place, Session
from burnish.config import Algo, Sampling
from burnish.models.heads import Scorer
from burnish.models.load import ModelError, load, load_scorer
from burnish.models.policy import Policy
from burnish.plan.preflight import ROOMS
from burnish.plan.teachers import vocabulary_gap
from burnish.ref import parameters
from burnish.rollout import Kept, KlReward, Visit, assemble, keep, run_groups
from burnish.rollout.batch import GROUP_COLUMNS, STEP_COLUMNS, names_of
from burnish.trainer import (
    COLUMNS,
    Against,
    Algorithm,
    Correction,
    EntropyTerm,
    KlTerm,
    Reference,
    Teachers,
    ValueObjective,
    ValueTerm,
    train_step,
    values_of,
)
from burnish.trainer.precision import DTYPES
from burnish.types import Batch, Group, Rollout, Row

REDUCE_ARGS = ("loss", "mask", "num_tokens", "num_rollouts")


@dataclass(frozen=True, slots=True)
class _Part:
    """The algorithm of one environment."""

    setting: Algo
    advantage: Callable[..., Tensor]
    normalize: Callable[..., Tensor] | None
    length_penalty: Callable[..., Tensor] | None
    objective: Algorithm
    kl: KlController | None
    entropy: tuple[EntropyTerm, EntropyController | None] | None
    baseline: EmaBaseline | None

    @property
    def wants_ref(self) -> bool:
        """Log-probs of the reference at the sampled tokens; the exact KL compares whole distributions instead."""
        if "logp_ref" in self.objective.columns:
            return True
        return self.kl is not None and (not self.objective.against or self.kl.target_nats is not None)


class PolicyGradient:
    """A learner of loop sync."""

    needs_reward = True

    def __init__(self, session: Session) -> None:
        self.session, s = session, session.settings
        self.algos = {place.name: place.setting.algo or s.algo for place in session.places}
        self.critic, self.critic_state, self.value_model = s.critic, None, None
        if s.critic is not None:
            self._make_critic()
        wants_ref = any(a.kl is not None or "logp_ref" in _loss_columns(a) for a in self.algos.values())
        self.reference = Reference(session.state.policy) if wants_ref else None
        self.teachers = teachers_of(session) if s.distill is not None else None
        self.constraint = None
        if (c := s.constraint) is not None:
            self.constraint = session.controls["constraint"] = PidMultiplier(c.limit, c.kp, c.ki, c.kd, max_multiplier=c.max_multiplier)
        self.parts = {name: self._part(name, algo) for name, algo in self.algos.items()}
        self.costs: list[float] = []           # of the rollouts of this step
        self.left_out = 0                      # of them, those that were kept and made no row
        self.step = partial(train_step, session.state, stop_at_kl_nats=_one_stop(self.algos.values()), **session.step_values())

    def keeping(self, place: Place) -> tuple[Callable[[Sequence[Group]], Kept], int]:
        """The function that keeps groups, and how often more tasks are drawn for those it drops."""
        algo = self.algos[place.name]
        rounds = algo.refill_rounds if algo.constant_groups == "refill" else 0
        return partial(keep, constant_groups=algo.constant_groups), rounds

    def of_groups(self, place: Place, groups: Sequence[Group]) -> Batch:
        """Advantages, with what they and the objective need of the reference, teachers, critic and greedy answers."""
        part, kl = self.parts[place.name], self.algos[place.name].kl
        names = names_of(part.advantage)
        kept = [item.rollout for g in groups for item in g.scored]
        greedy = None
        if "greedy_reward" in names:
            groups, greedy = self._greedy(place, groups)
        rollouts = [item.rollout for g in groups for item in g.scored]
        rows = [Row(r.tokens, r.sampled) for r in rollouts]
        given: dict[str, Any] = {}
        if part.wants_ref:
            self.session.live.status("scoring with the reference")
            given["logp_ref"] = self.reference.score(rows, **self._sized)
        if self.teachers is not None and ("logp_teach" in names or "logp_teach" in part.objective.columns):
            self.session.live.status("scoring with the teachers")
            given["logp_teach"] = self.teachers.score(rows, **self._sized)
        if self.value_model is not None:
            self.session.live.status("scoring with the critic")
            given["value"], given["bootstrap"] = values_of(self.value_model, rollouts, bootstrap=self.critic.bootstrap, **self._sized)
        if part.baseline is not None:
            rewards = [item.reward for g in groups for item in g.scored]
            mean = sum(rewards) / len(rewards) if rewards else None
            given["baseline"] = part.baseline.value if part.baseline.value is not None else mean
            if mean is not None:
                part.baseline.update(mean)
        if self.constraint is not None:
            self.costs += [item.cost for g in groups for item in g.scored]
        batch = assemble(
            groups, advantage=part.advantage, normalize=part.normalize, greedy_reward=greedy,
            kl=KlReward(kl.estimator, part.kl.coef, kl.place == "token_reward") if kl and kl.place != "loss" else None,
            length_penalty=part.length_penalty, multiplier=self.constraint.multiplier if self.constraint else None,
            drop_truncated=part.setting.truncated == "drop", algo=place.name, **given,
        )
        self.left_out += len(kept) - len(batch.rows)
        return Batch(_numbered(batch.rows, rollouts, kept))

    def update(self, batch: Batch) -> dict[str, float]:
        state = self.session.state
        warming = self.critic is not None and state.step < self.critic.warmup_steps
        objectives = {name: self._warm(part.objective) if warming else part.objective for name, part in self.parts.items()}
        if warming and self.critic.kind == "model":
            state.updates += self.session.settings.train.epochs * self.session.settings.train.minibatches
            metrics: dict[str, float] = {"train/rollouts_count": 0, "train/tokens_count": 0}
        else:
            metrics = self.step(batch, objectives, **({"stop_at_kl_nats": None} if warming else {}))
        if self.critic_state is not None:
            metrics |= self._update_critic(batch)
        for name, part in self.parts.items():
            metrics |= self._control(name, part, [] if warming else [row for row in batch.rows if row.algo == name], metrics)
        if self.constraint is not None:
            metrics |= self._constrain(frozen=warming)
        metrics["rollout/left_out_count"], self.left_out = self.left_out, 0
        return metrics

    # parts

    @property
    def _sized(self) -> dict[str, Any]:
        s = self.session.settings
        return {"sampling": s.sampling, "tokens_per_micro_batch": s.train.tokens_per_micro_batch}

    def _part(self, name: str, algo: Algo) -> _Part:
        s, tag = self.session.settings, f"{name}/" if name else ""
        kl = entropy = baseline = None
        if algo.kl is not None:
            kl = self.session.controls[f"{tag}kl"] = KlController(algo.kl.coef, algo.kl.target_nats, algo.kl.horizon_rollouts)
        if algo.entropy is not None:
            e = algo.entropy
            term = self.session.controls[f"{tag}entropy"] = EntropyTerm(e.coef if e.target_nats is None else 0.0)
            control = None
            if e.target_nats is not None:
                control = self.session.controls[f"{tag}entropy_control"] = EntropyController(e.coef, e.target_nats, e.delta, e.max_coef)
            entropy = (term, control)
        advantage = algo.advantage.bind(provided={*GROUP_COLUMNS, *STEP_COLUMNS}, room=ROOMS["algo.advantage"])
        if "baseline" in names_of(advantage):
            baseline = self.session.controls[f"{tag}baseline"] = EmaBaseline(algo.baseline_decay)
        in_loss = algo.kl is not None and algo.kl.place == "loss" and algo.kl.coef > 0
        correction = algo.correction
        objective = Algorithm(
            loss=algo.loss.bind(provided=COLUMNS, room=ROOMS["algo.loss"]),
            reduce=algo.reduce.bind(provided=REDUCE_ARGS, room=ROOMS["algo.reduce"]),
            kl=KlTerm(algo.kl.estimator, algo.kl.gradient, kl, self._exact(algo, s.sampling)) if in_loss else None,
            correction=Correction(
                correction.fn.bind(provided=("log_ratio", "mask"), room=ROOMS["algo.correction.fn"]), correction.normalize,
                correction.denominator,
            ) if correction is not None else None,
            entropy=entropy[0] if entropy else None,
            value=ValueTerm(self._value_loss(), s.critic.coef) if s.critic is not None and s.critic.kind == "head" else None,
            prox=algo.prox,
        )
        normalize = algo.normalize.bind(provided=("adv", "mask"), room=ROOMS["algo.advantage"]) if algo.normalize else None
        penalty = algo.length_penalty.bind(provided=("num_tokens",), room=ROOMS["algo.length_penalty"]) if algo.length_penalty else None
        return _Part(algo, advantage, normalize, penalty, objective, kl, entropy, baseline)

    def _exact(self, algo: Algo, sampling: Sampling) -> Against | None:
        if algo.kl.estimator != "exact":
            return None
        scale = sampling.temperature
        return Against((self.reference,), (1.0,), lambda cur, ref: exact_kl(cur / scale, ref / scale))

    def _value_loss(self) -> Callable[..., Tensor]:
        return self.critic.loss.bind(provided=("value_cur", "value_prox", "ret"), room=ROOMS["critic.loss"])

    def _make_critic(self) -> None:
        session, s = self.session, self.session.settings
        if s.critic.kind == "head":
            self.value_model = session.state.policy
            return
        session.live.status("loading the critic")
        model = s.critic.model or s.model
        self.critic_state = session.add_state("critic", load_scorer(model, seed=s.seed), kind=Scorer, dtype=model.dtype)
        self.value_model = self.critic_state.policy
        reduce = s.algo.reduce.bind(provided=REDUCE_ARGS, room=ROOMS["algo.reduce"])
        self.critic_step = partial(
            train_step, self.critic_state, algo=ValueObjective(self._value_loss(), reduce),
            **session.step_values(lr=s.critic.lr) | {"dropout": bool(model.lora and model.lora.dropout)},
        )

    def _update_critic(self, batch: Batch) -> dict[str, float]:
        self.critic_state.step = self.session.state.step
        rows = tuple(replace(row, algo="") for row in batch.rows)
        metrics = self.critic_step(Batch(rows))
        names = {"train/loss": "train/critic_loss", "train/value_error": "train/value_error", "train/grad_norm": "train/critic_grad_norm",
            "train/skipped_updates_count": "train/critic_skipped_updates_count"}
        return {ours: metrics[name] for name, ours in names.items() if name in metrics}

    def _warm(self, objective: Algorithm) -> Algorithm:
        """Only the values, without a gradient for the body."""
        if objective.value is None:
            return objective
        return Algorithm(loss=None, reduce=objective.reduce, value=replace(objective.value, only_head=True))

    def _greedy(self, place: Place, groups: Sequence[Group]) -> tuple[list[Group], list[float]]:
        """The reward of each task's most probable answer (ReMax); groups whose answer could not be scored are left out."""
        s = self.session.settings
        greedy = Sampling(**{**s.sampling.model_dump(), "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
        answers = run_groups(
            [Visit(g.task) for g in groups], sampling=greedy, samples_per_prompt=1, purpose="greedy",
            progress=partial(self.session.live.status, "generating greedily"),
            **self.session.parts(place, rewards="normalized") | {"clock": None},
        )
        known = [(g, a.scored[0].reward) for g, a in zip(groups, answers, strict=True) if a.scored[0].reward is not None]
        return [g for g, _ in known], [reward for _, reward in known]

    def _constrain(self, *, frozen: bool) -> dict[str, float]:
        """The multiplier that the step was trained with, and its mean cost, which moves the multiplier of the next one."""
        out = {"train/constraint_multiplier": self.constraint.multiplier}
        if self.costs:
            out["rollout/cost_mean"] = sum(self.costs) / len(self.costs)
            if not frozen:
                self.constraint.update(out["rollout/cost_mean"])
        self.costs = []
        return out

    def _control(self, name: str, part: _Part, rows: Sequence[Row], metrics: dict[str, float]) -> dict[str, float]:
        """What the controllers make of the step, and their values while it was trained."""
        tag, out = f"_{name}" if name else "", {}
        if part.kl is not None:
            out[f"train/kl_coef{tag}"] = part.kl.coef
            sums = [_kl_sum(row) for row in rows if "logp_ref" in row.columns]
            if sums:
                part.kl.update(sum(sums) / len(sums), len(sums))
        if part.entropy is not None:
            term, control = part.entropy
            out[f"train/entropy_coef{tag}"] = term.coef
            if control is not None and rows and f"train/entropy_nats{tag}" in metrics:
                term.coef = control.update(metrics[f"train/entropy_nats{tag}"])
        return out


def teachers_of(session: Session) -> Teachers:
    """The teachers of the settings, frozen, each in the dtype it computes in. ModelError for one whose tokens are not the policy's."""
    s, policies = session.settings, []
    for i, teacher in enumerate(s.distill.teachers):
        session.live.status("loading a teacher")
        loaded = load(teacher.model, seed=s.seed)
        if gap := vocabulary_gap(session.loaded.tokenizer.get_vocab(), loaded.tokenizer.get_vocab()):
            raise ModelError(f"distill.teachers.{i}.model: {gap}")
        module = loaded.module.requires_grad_(False)
        for p in module.parameters():
            p.data = p.data.to(DTYPES[teacher.model.dtype])
        policies.append(Policy(module.to(session.state.policy.device)))
    return Teachers(policies, [teacher.weight for teacher in s.distill.teachers])


def _numbered(rows: Sequence[Row], made_of: Sequence[Rollout], kept: Sequence[Rollout]) -> tuple[Row, ...]:
    """The rows with their places among all rollouts that were kept, where they were made of some of them."""
    if len(made_of) == len(kept):
        return tuple(rows)
    place = {(r.task.id, r.sample): i for i, r in enumerate(kept)}
    at = [place[r.task.id, r.sample] for r in made_of]
    return tuple(replace(row, numbers={**row.numbers, "rollout": at[int(row.numbers["rollout"])]}) for row in rows)


def _loss_columns(algo: Algo) -> set[str]:
    return set(parameters(algo.loss.load(room=ROOMS["algo.loss"])))


def _one_stop(algos: Any) -> float | None:
    return min((a.stop_at_kl_nats for a in algos if a.stop_at_kl_nats is not None), default=None)


def _kl_sum(row: Row) -> float:
    """Estimated KL to the reference in nats, summed over the sampled tokens of one rollout."""
    gen, ref = (torch.tensor(row.columns[name], dtype=torch.float64) for name in ("logp_gen", "logp_ref"))
    return float(torch.where(torch.tensor(row.mask), ESTIMATORS["k3"](gen, ref), 0.0).sum())

