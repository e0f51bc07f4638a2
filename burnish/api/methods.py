"""Which parts a loop is made of."""

from __future__ import annotations

from typing import Any

from burnish.api.answers import Answers
from burnish.api.distillation import Distillation
from burnish.api.policy_gradient import PolicyGradient
from burnish.api.preferences import Preferences
from burnish.api.reward_models import RewardModels
from burnish.api.session import Method, Session
from burnish.api.supervised import Supervised
from burnish.api.sync import Sync
from burnish.chat.template import end_token_ids
from burnish.config import Settings
from burnish.models.heads import Scorer, add_thresholds, add_value_head, name_pad_token
from burnish.models.load import Loaded, load, load_scorer
from burnish.models.policy import Policy


def load_model(s: Settings) -> Loaded:
    """The model that is trained, with the heads that the method needs."""
    if s.reward_model is not None:
        loaded = load_scorer(s.model, seed=s.seed, outputs=s.reward_model.outputs)
        name_pad_token(loaded.module, loaded.tokenizer, end_token_ids=end_token_ids(loaded.tokenizer, s.evaluate.sampling.end_tokens))
        if s.reward_model.classes is not None:
            add_thresholds(loaded.module, classes=s.reward_model.classes)
        return loaded
    loaded = load(s.model, seed=s.seed)
    if s.critic is not None and s.critic.kind == "head":
        add_value_head(loaded.module)
    return loaded


def kind_of(s: Settings) -> Any:
    return Scorer if s.reward_model is not None else Policy


def make_method(session: Session) -> Method:
    s = session.settings
    if s.loop == "sync" and s.algo is not None:
        return Sync(session, PolicyGradient(session))
    if s.sft is not None:
        learner = Supervised(session)
        return Sync(session, learner) if s.loop == "sync" else Answers(session, learner)
    if s.distill is not None:
        learner = Distillation(session)
        return Sync(session, learner) if s.loop == "sync" else Answers(session, learner, prepare=learner.answer)
    if s.preference is not None:
        learner = Preferences(session)
        return Sync(session, learner) if s.loop == "sync" else Answers(session, learner)
    return Answers(session, RewardModels(session))
