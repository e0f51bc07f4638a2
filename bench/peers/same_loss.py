"""The same batch through burnish and through TRL: how far apart value and gradient are, loss by loss.

TRL lives in an environment of its own. Made once, from the root of the repository:

    python3 -m venv build/venv-trl
    build/venv-trl/bin/pip install torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
    build/venv-trl/bin/pip install -r bench/peers/requirements-trl.txt
    build/venv-trl/bin/pip install --no-deps -e .

Then, on the CPU:

    build/venv-trl/bin/python bench/peers/same_loss.py

TRL's side is compute_loss of its own trainers on hand-made inputs. burnish's side is burnish.algorithms on log-probs of the same
weights from a plain forward pass. Gradients are those of all parameters of a random Llama (2 layers, 64 wide), in float32.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

try:
    import datasets
    import torch
    import transformers
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torch import Tensor, nn
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar
    from trl.trainer.utils import add_fused_lm_head

    with warnings.catch_warnings(action="ignore"):             # that trl.experimental may change; its version is pinned
        from trl.experimental import cpo, gkd, gmpo, online_dpo, orpo, tpo

    from burnish.algorithms import (
        advantages,
        corrections,
        divergences,
        penalties,
        policy_losses,
        preference_losses,
        preference_terms,
        reduce,
        returns,
        reward_losses,
        token_losses,
    )
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}. This script needs the environment that its first lines tell how to make.") from None

TOLERANCE = 1e-5
ROUNDING = "neither: rounding of a gradient that exceeds 1; in float64 burnish is about as far from either (see bench/LOG.md)."
VOCAB, PAD = 64, 63
ROLLOUTS, GROUP, PAIRS = 6, 3, 5
START, END = "<!-- written by bench/peers/same_loss.py -->", "<!-- end -->"
EXAMPLES = """
examples:
  same_loss.py                                   the whole table, each line the largest difference over 3 batches
  same_loss.py --only 'dpo.*smoothing' -n 10     the losses whose line matches, over 10 batches
  same_loss.py --write docs/algorithms/peers.md  also puts the table into that page
Above 1e-5 a difference needs an explanation; up to 1e-5 times the largest entry of the gradient, rounding is one.
Exit code 1: a difference without an explanation, or an explanation that does not hold.
"""

# Lines above TOLERANCE: who is right, and why. `their_way` of the case shows that there is no other reason.
EXPLAINED = {
    "ppo_clip, token_mean, two micro-batches (bnpo)":
        "burnish: TRL's bnpo is the mean of the micro-batches' means (documented), so the gradient depends on the split.",
    "ppo_clip, token_mean, two steps a generation":
        "burnish: it divides by the tokens of the update; TRL by the mean over the updates of a generation, whose lengths then matter.",
    "ppo_clip, rollout_mean, a rollout without a trained token":
        "burnish: TRL counts the rollout in the mean, so a step shrinks with the share of rollouts that are masked out.",
    "ppo_clip, rollout_sum_over, a rollout without a trained token":
        "burnish: as the line before.",
    "ppo_clip - entropy, rollout_mean":
        "either: burnish's bonus weighs rollouts as the loss beside it, TRL's is a mean over tokens whatever the loss (documented).",
    "ppo_clip - entropy, token_mean, two micro-batches":
        "burnish: TRL's bonus is the mean of the micro-batches' means, so the gradient depends on the split.",
    "gspo + k3, importance_weighted":
        "burnish: KL(cur‖ref) needs each token's own ratio; TRL takes the rollout's, and documents that this is not unbiased.",
    "sequence_ppo, rollout_mean, a log-ratio of 100":
        "burnish: TRL clips the ratio after exp has overflowed, and inf * 0 makes the gradient NaN; burnish bounds its logarithm.",
    "standardize, seven rewards of 0.7":
        "burnish: equal rewards carry no signal; in float32 their mean is an ulp off 0.7, which TRL divides by 1e-4 and a little.",
    "dpo: sigmoid, label_smoothing 0.1":
        "burnish: TRL accepts label_smoothing with loss_type sigmoid and does not use it, so there is no cDPO.",
    "dpo: ipo, length_normalize False":
        "open: eq. 17 of the paper sums, as this line; TRL divides by length (its source: on the authors' word), as the other line of ipo.",
    "dpo: bco_pair, running delta":
        "burnish: BCO shifts rewards by their running mean; TRL's bco_pair has no such shift (delta 0).",
    "dpo: sigmoid + nll, example_mean":
        "burnish, for IRPO: its NLL is divided by the answer's own length; TRL's sft is a mean over all tokens, as the line before.",
    "cpo: cpo + nll, sequence_sum":
        "burnish: CPO's NLL is the answer's sum; TRL's is a mean over all tokens, as the line before.",
    "orpo: orpo + nll, example_mean":
        "burnish: ORPO's NLL is that of the answer given the prompt; TRL's covers the prompt too, as a mean over all tokens.",
    "best_and_worst, sigmoid, equal rewards":
        "burnish: equal rewards prefer neither completion; TRL trains on the first as chosen.",
}  # fmt: skip


# models and batches


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({**{f"w{i}": i for i in range(VOCAB - 2)}, "</s>": VOCAB - 2, "<pad>": PAD}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>", padding_side="left")


def _llama(kind: type, **settings: Any) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.1, pad_token_id=PAD, eos_token_id=VOCAB - 2, bos_token_id=None, **settings,
    )  # fmt: skip
    return kind(config)


def _near(model: nn.Module, size: float) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(size * torch.randn_like(p))
    return other


def _padded(rows: Sequence[Sequence[int]], fill: int, *, left: bool = False) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[fill] * (width - len(r)) + [*r] if left else [*r] + [fill] * (width - len(r)) for r in rows])


def _text(low: int, high: int) -> list[int]:
    return torch.randint(VOCAB - 2, (int(torch.randint(low, high + 1, ())),)).tolist()


def _trained(length: int) -> list[int]:
    """1 for a trained token, 0 for a hole; the first is trained."""
    return [1, *(torch.rand(length - 1) > 0.3).long().tolist()]


def _answers(prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> dict[str, Tensor]:
    """Prompt and answer in one row, padded on the right as TRL's collators do it."""
    rows = [p + t for p, t in zip(prompts, texts, strict=True)]
    mask = [[0] * len(p) + _trained(len(t)) for p, t in zip(prompts, texts, strict=True)]
    ones = [[1] * len(row) for row in rows]
    return {"input_ids": _padded(rows, PAD), "attention_mask": _padded(ones, 0), "completion_mask": _padded(mask, 0)}


class Batch:
    """Models and inputs; all of it follows from the seed."""

    def __init__(self, seed: int, folder: str) -> None:
        torch.manual_seed(seed)
        self.folder, self.tokenizer = folder, _tokenizer()
        self.policy = _llama(LlamaForCausalLM)
        self.policy.config._name_or_path = folder              # TRL loads a reference model from there
        self.policy.save_pretrained(folder)
        self.ref, self.teacher = _near(self.policy, 0.01), _llama(LlamaForCausalLM)
        self.scorer = _llama(LlamaForSequenceClassification, num_labels=1)
        self.rollouts = self._rollouts()
        self.reward, self.logp_gen = torch.rand(ROLLOUTS, 2), self._moved(self.rollouts["logp"])
        self.pairs = _answers(2 * (prompts := [_text(2, 5) for _ in range(PAIRS)]), [_text(3, 9) for _ in range(2 * PAIRS)])
        self.mismatched = _answers(2 * (prompts[1:] + prompts[:1]), [_text(3, 9) for _ in range(2 * PAIRS)])
        self.margin, self.desirable = torch.rand(PAIRS), torch.rand(2 * PAIRS) > 0.6

    def _rollouts(self) -> dict[str, Tensor]:
        prompts, texts = [_text(1, 5) for _ in range(ROLLOUTS)], [_text(3, 9) for _ in range(ROLLOUTS)]
        r = {
            "prompt_ids": _padded(prompts, PAD, left=True), "prompt_mask": _padded([[1] * len(p) for p in prompts], 0, left=True),
            "completion_ids": _padded(texts, PAD), "completion_mask": _padded([[1] * len(t) for t in texts], 0),
            "tool_mask": _padded([_trained(len(t)) for t in texts], 1), "advantages": torch.randn(ROLLOUTS),
        }  # fmt: skip
        with torch.no_grad():
            r["logp"] = rollout_logp(self.policy, r)[1]
        return with_count(r | {"old_per_token_logps": self._moved(r["logp"]), "ref_per_token_logps": self._moved(r["logp"])})

    @staticmethod
    def _moved(logp: Tensor) -> Tensor:
        return logp + 0.3 * torch.randn_like(logp)


def with_count(r: dict[str, Tensor]) -> dict[str, Tensor]:
    return r | {"num_items_in_batch": trained(r).sum(), "old_logps": (r["old_per_token_logps"] * trained(r)).sum(1)}


def rows_of(r: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {k: v[rows] if v.dim() else v for k, v in r.items()}


def trained(r: dict[str, Tensor]) -> Tensor:
    return (r["completion_mask"] * r.get("tool_mask", 1)).bool()


# burnish's side


def rollout_logp(model: nn.Module, r: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits [B,T,V] at the tokens of the completions, and these tokens' log-probs [B,T]."""
    ids, attention = (torch.cat([r[f"prompt_{k}"], r[f"completion_{k}"]], 1) for k in ("ids", "mask"))
    logits = model(input_ids=ids, attention_mask=attention).logits[:, r["prompt_ids"].shape[1] - 1 : -1]
    return logits, logits.log_softmax(-1).gather(-1, r["completion_ids"][..., None]).squeeze(-1)


def answer_logp(model: nn.Module, a: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probs [B,T-1] of the tokens from the second on, and which of these are trained."""
    logits = model(input_ids=a["input_ids"], attention_mask=a["attention_mask"]).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, a["input_ids"][:, 1:, None]).squeeze(-1), a["completion_mask"][:, 1:].bool()


def named(fn: Callable[..., Tensor], columns: dict[str, Any], **settings: Any) -> Tensor:
    """fn of those columns that it names."""
    return fn(**{k: columns[k] for k in inspect.signature(fn).parameters if k in columns}, **settings)


def policy_columns(b: Batch, r: dict[str, Tensor]) -> dict[str, Tensor]:
    logits, logp = rollout_logp(b.policy, r)
    columns = {
        "logp_cur": logp, "logp_prox": r["old_per_token_logps"], "logp_gen": r["old_per_token_logps"], "logp_ref": r["ref_per_token_logps"],
        "entropy": penalties.entropy(logits), "adv": r["advantages"][:, None].expand_as(logp),
    }  # fmt: skip
    return {"mask": trained(r), **{k: reduce.masked(v, trained(r)) for k, v in columns.items()}}


def counts(mask: Tensor) -> dict[str, int]:
    return {"num_tokens": int(mask.sum()), "num_rollouts": int(mask.any(1).sum())}


@dataclass(frozen=True)
class Policy:
    """A policy loss with its reduction, and what may be added to it."""

    loss: Callable[..., Tensor]
    settings: dict[str, Any]
    reduce: Callable[..., Tensor]
    kl_gradient: str | None = None
    kl_coef: float = 0.1
    entropy_coef: float = 0.0
    entropy_reduce: Callable[..., Tensor] | None = None

    def __call__(self, b: Batch, r: dict[str, Tensor], *, weight: Tensor | None = None, **count: float) -> Tensor:
        c = policy_columns(b, r)
        loss = named(self.loss, c, **self.settings)
        loss = loss if weight is None else loss * weight
        if self.kl_gradient:
            loss = loss + self.kl_coef * named(penalties.kl_loss, c, estimator="k3", gradient=self.kl_gradient)
        count = counts(c["mask"]) | count
        entropy = (self.entropy_reduce or self.reduce)(c["entropy"], c["mask"], **count)
        return self.reduce(loss, c["mask"], **count) - self.entropy_coef * entropy


def pair_columns(b: Batch, ld_alpha: float = 1.0) -> dict[str, Tensor]:
    out = {}
    for name, model in (("cur", b.policy), ("ref", b.ref)):
        logp, mask = answer_logp(model, b.pairs)
        for side, own, other in (("chosen", slice(PAIRS), slice(PAIRS, None)), ("rejected", slice(PAIRS, None), slice(PAIRS))):
            total = preference_terms.length_desensitized(logp[own], mask[own], mask[other], alpha=ld_alpha)
            out[f"{name}_{side}"] = total if name == "cur" else total.detach()
            out[f"tokens_{side}"] = mask[own].sum(1)
    return out


def pair_loss(b: Batch, fn: Callable[..., Tensor], *, ld_alpha: float = 1.0, **settings: Any) -> Tensor:
    return named(fn, pair_columns(b, ld_alpha), **settings).mean()


def nll(b: Batch, normalization: str, *, with_prompt: bool = False) -> Tensor:
    logp, mask = answer_logp(b.policy, b.pairs)
    mask = b.pairs["attention_mask"][:, 1:].bool() if with_prompt else mask
    logp, mask = logp[:PAIRS], mask[:PAIRS]
    count = {"num_pairs": PAIRS, "num_tokens": int(mask.sum())}
    return preference_losses.nll(preference_terms.sequence_logprob(logp, mask), mask.sum(1), normalization=normalization, **count).mean()


# TRL's side

SAID = ["w1 w2"] * ROLLOUTS
PROMPTS, SUPERVISED = {"prompt": SAID}, {"prompt": SAID, "completion": SAID}
PREFERENCES = {"prompt": SAID, "chosen": SAID, "rejected": SAID}
LABELLED = SUPERVISED | {"label": [True, False] * (ROLLOUTS // 2)}
CHAT = {"messages": [[{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]] * ROLLOUTS}
TRAINERS = {                                                   # with data to be made with; what they are fed is made by hand
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, PROMPTS), "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, PROMPTS),
    "GMPO": (gmpo.GMPOTrainer, gmpo.GMPOConfig, PROMPTS), "OnlineDPO": (online_dpo.OnlineDPOTrainer, online_dpo.OnlineDPOConfig, PROMPTS),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, PREFERENCES), "ORPO": (orpo.ORPOTrainer, orpo.ORPOConfig, PREFERENCES),
    "CPO": (cpo.CPOTrainer, cpo.CPOConfig, PREFERENCES), "TPO": (tpo.TPOTrainer, tpo.TPOConfig, PREFERENCES | {"reference": SAID}),
    "KTO": (trl.KTOTrainer, trl.KTOConfig, LABELLED),
    "Reward": (trl.RewardTrainer, trl.RewardConfig, PREFERENCES), "SFT": (trl.SFTTrainer, trl.SFTConfig, SUPERVISED),
    "GKD": (gkd.GKDTrainer, gkd.GKDConfig, CHAT), "Distillation": (trl.DistillationTrainer, trl.DistillationConfig, PROMPTS),
}  # fmt: skip
Settings = dict[str, Any]
Outcome = tuple[Tensor, list[Tensor]]                          # value, gradient of each parameter


def trainer(b: Batch, kind: str, settings: Settings) -> Any:
    make, config, data = TRAINERS[kind]
    extra: dict[str, Any] = {}
    if kind in ("GRPO", "RLOO", "GMPO", "OnlineDPO"):
        num_scores = 2 if settings.get("multi_objective_aggregation") == "normalize_then_sum" else 1
        extra["reward_funcs"] = [lambda **_: None] * num_scores
    if kind in ("GRPO", "RLOO", "GMPO"):
        settings = {"num_generations": GROUP} | settings
    if kind in ("DPO", "OnlineDPO", "KTO"):
        extra["ref_model"] = copy.deepcopy(b.ref)
    if kind in ("GKD", "Distillation"):
        extra["teacher_model"] = copy.deepcopy(b.teacher)
    size = max(ROLLOUTS, settings.get("num_generations", 1))
    args = config(output_dir=b.folder, report_to="none", use_cpu=True, bf16=False, per_device_train_batch_size=size, **settings)
    model = copy.deepcopy(b.scorer if kind == "Reward" else b.policy)
    t = make(model, args=args, train_dataset=datasets.Dataset.from_dict(data), processing_class=b.tokenizer, **extra)
    t.current_gradient_accumulation_steps = args.gradient_accumulation_steps       # transformers does it while training
    t.model.train()
    return t


def gradient(loss: Tensor, model: nn.Module) -> Outcome:
    if not loss.requires_grad:
        return loss, []
    params = list(model.parameters())
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    return loss.detach(), [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params, strict=True)]


def computed(b: Batch, kind: str, settings: Settings, *parts: dict[str, Tensor], **more: Any) -> Outcome:
    """The sum of compute_loss over micro-batches."""
    t = trainer(b, kind, settings)
    return gradient(sum(t.compute_loss(t.model, dict(part), **more) for part in parts), t.model)


def generated(b: Batch, kind: str, settings: Settings, reward: Tensor, logp_gen: Tensor | None = None) -> tuple[Any, dict[str, Tensor]]:
    """A trainer and what it makes of finished rollouts: its _generate_and_score_completions with sampling and rewards put in."""
    t, r, rows = trainer(b, kind, settings), b.rollouts, [i % ROLLOUTS for i in range(len(reward))]

    def cut(column: Tensor, mask: str) -> list[list]:
        return [column[i][r[mask][i].bool()].tolist() for i in rows]

    ids = cut(r["prompt_ids"], "prompt_mask"), cut(r["completion_ids"], "completion_mask")
    sampler = None if logp_gen is None else cut(logp_gen, "completion_mask")
    text = ["w1"] * len(rows)
    made = (*ids, text) if kind == "RLOO" else (*ids, cut(r["tool_mask"], "completion_mask"), text, sampler, {}, None, [])
    t._generate, t._calculate_rewards = lambda _: made, lambda *_: reward
    t.use_vllm = logp_gen is not None                          # TRL corrects only what vLLM sampled
    if t.beta:
        t.ref_model = copy.deepcopy(b.ref)
        add_fused_lm_head(t.ref_model)
    return t, t._generate_and_score_completions([{"prompt": "w1"}] * len(rows))


# the cases


@dataclass(frozen=True)
class Case:
    """One line: a loss of burnish, and what TRL's trainer gives; `their_way` is burnish's pieces put together as TRL does it."""

    name: str
    kind: str
    settings: Settings
    theirs: Callable[[], Outcome]
    ours: Callable[[], Tensor]
    their_way: Callable[[], Tensor] | None = None


def policy_cases(b: Batch) -> Iterator[Case]:
    r = b.rollouts
    halves = [rows_of(r, slice(0, 3)), rows_of(r, slice(3, 6))]
    empty = with_count(r | {"tool_mask": r["tool_mask"] * (torch.arange(ROLLOUTS) != 1)[:, None]})
    whole = with_count({k: v for k, v in r.items() if k != "tool_mask"})           # RLOO knows no holes
    far = whole | {"advantages": whole["advantages"].abs(), "old_per_token_logps": whole["old_per_token_logps"].clone()}
    far["old_per_token_logps"][0] -= 100 / trained(whole)[0].sum()
    clip, clip_s = {"eps_low": 0.2, "eps_high": 0.28}, {"eps_low": 0.05, "eps_high": 0.05}
    their_clip = {"epsilon": 0.2, "epsilon_high": 0.28}
    ppo, mean, by_token = policy_losses.ppo_clip, reduce.rollout_mean, reduce.token_mean

    def case(name: str, settings: Settings, ours: Policy, *, kind: str = "GRPO", r: dict = r, parts: Sequence[dict] = (),
             their_way: Callable[[], Tensor] | None = None) -> Case:  # fmt: skip
        return Case(name, kind, settings, partial(computed, b, kind, settings, *(parts or [r])), partial(ours, b, r), their_way)

    grpo, dapo = {"loss_type": "grpo", **their_clip}, {"loss_type": "dapo", **their_clip}
    dr_grpo = {"loss_type": "dr_grpo", "max_completion_length": 20, **their_clip}
    by_constant = partial(reduce.rollout_sum_over, length=20)
    split = {"gradient_accumulation_steps": 2}
    yield case("ppo_clip, rollout_mean", grpo, Policy(ppo, clip, mean))
    yield case("ppo_clip, token_mean", dapo, Policy(ppo, clip, by_token))
    yield case("ppo_clip, rollout_sum_over", dr_grpo, Policy(ppo, clip, by_constant))
    yield case("ppo_clip, rollout_mean, two micro-batches", grpo | split, Policy(ppo, clip, mean), parts=halves)
    yield case("ppo_clip, token_mean, two micro-batches", dapo | split, Policy(ppo, clip, by_token), parts=halves)
    yield case("ppo_clip, token_mean, two micro-batches (bnpo)", {"loss_type": "bnpo", **split, **their_clip}, Policy(ppo, clip, by_token),
               parts=halves, their_way=lambda: sum(Policy(ppo, clip, by_token)(b, half) for half in halves) / 2)  # fmt: skip
    tokens = int(r["num_items_in_batch"]) / 2
    yield case("ppo_clip, token_mean, two steps a generation", dapo | {"steps_per_generation": 2}, Policy(ppo, clip, by_token), r=halves[0],
               their_way=lambda: Policy(ppo, clip, by_token)(b, halves[0], num_tokens=tokens))  # fmt: skip
    for settings, how in ((grpo, mean), (dr_grpo, by_constant)):
        name = f"ppo_clip, {getattr(how, 'func', how).__name__}, a rollout without a trained token"
        ours = Policy(ppo, clip, how)
        yield case(name, settings, ours, r=empty, their_way=partial(ours, b, empty, num_rollouts=ROLLOUTS))
    yield case("ppo_clip with dual_clip, token_mean", dapo | {"delta": 1.4}, Policy(ppo, clip | {"dual_clip": 1.4}, by_token))

    for gradient_of, corrected in (("naive", False), ("importance_weighted", True)):
        settings = grpo | {"beta": 0.1, "use_bias_correction_kl": corrected}
        yield case(f"ppo_clip + k3, {gradient_of}", settings, Policy(ppo, clip, mean, kl_gradient=gradient_of))
    coef, curious = {"entropy_coef": 0.1}, partial(Policy, ppo, clip, entropy_coef=0.1)
    yield case("ppo_clip - entropy, token_mean", dapo | coef, curious(by_token))
    yield case("ppo_clip - entropy, rollout_mean", grpo | coef, curious(mean),
               their_way=partial(curious(mean, entropy_reduce=by_token), b, r))  # fmt: skip
    yield case("ppo_clip - entropy, token_mean, two micro-batches", dapo | split | coef, curious(by_token), parts=halves,
               their_way=lambda: Policy(ppo, clip, by_token)(b, r) - 0.1 * sum(mean_entropy(b, half) for half in halves) / 2)  # fmt: skip

    sequence = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05}
    gspo = partial(Policy, policy_losses.gspo, clip_s)
    yield case("gspo, rollout_mean", sequence, gspo(mean))
    yield case("gspo_token, rollout_mean", sequence, Policy(policy_losses.gspo_token, clip_s, mean))
    yield case("gspo, rollout_sum", sequence | {"loss_type": "luspo"}, gspo(reduce.rollout_sum))
    yield case("gspo + k3, importance_weighted", sequence | {"beta": 0.1}, gspo(mean, kl_gradient="importance_weighted"),
               their_way=lambda: gspo(mean)(b, r) + 0.1 * k3_by_rollout(b, r))  # fmt: skip
    yield case("cispo, token_mean", {"loss_type": "cispo", "epsilon_high": 1.3},
               Policy(policy_losses.cispo, {"ratio_min": 0.0, "ratio_max": 1.3}, by_token))  # fmt: skip
    yield case("sapo, rollout_mean", {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
               Policy(policy_losses.sapo, {"tau_pos": 1.0, "tau_neg": 1.05}, mean))  # fmt: skip
    yield case("gmpo, rollout_mean", {"epsilon": 0.2, "epsilon_high": 0.3},
               Policy(policy_losses.gmpo, {"log_clip_low": 0.2, "log_clip_high": 0.3}, mean), kind="GMPO")  # fmt: skip
    product = Policy(policy_losses.sequence_ppo, clip, mean)
    yield case("sequence_ppo, rollout_mean", their_clip, product, r=whole, kind="RLOO")
    yield case("sequence_ppo, rollout_mean, a log-ratio of 100", their_clip, product, r=with_count(far), kind="RLOO")


def mean_entropy(b: Batch, r: dict[str, Tensor]) -> Tensor:
    c = policy_columns(b, r)
    return reduce.token_mean(c["entropy"], c["mask"], **counts(c["mask"]))


def k3_by_rollout(b: Batch, r: dict[str, Tensor]) -> Tensor:
    c = policy_columns(b, r)
    ratio = policy_losses.sequence_ratio(c["logp_cur"] - c["logp_prox"], c["mask"])[:, None]
    return reduce.rollout_mean(ratio * penalties.k3(c["logp_cur"], c["logp_ref"]), c["mask"], **counts(c["mask"]))


def by_group(fn: Callable[..., Tensor], reward: Tensor, **settings: Any) -> Tensor:
    return torch.cat([fn(reward[i : i + GROUP], **settings) for i in range(0, ROLLOUTS, GROUP)])


def correction_cases(b: Batch) -> Iterator[Case]:
    reward = b.reward.sum(1)
    r = b.rollouts | {"advantages": by_group(advantages.standardize, reward), "old_per_token_logps": b.rollouts["logp"]}
    ours = Policy(policy_losses.ppo_clip, {"eps_low": 0.2, "eps_high": 0.2}, reduce.token_mean)

    def theirs(settings: Settings) -> Outcome:
        t, inputs = generated(b, "GRPO", settings, reward[:, None], b.logp_gen)
        return gradient(t.compute_loss(t.model, inputs), t.model)

    for fn, bounds in (
        (corrections.token_truncate, {"high": 1.2}), (corrections.token_mask, {"low": 0.8, "high": 1.3}),
        (corrections.sequence_truncate, {"high": 1.2}), (corrections.sequence_mask, {"low": 0.6, "high": 2.3}),
    ):  # fmt: skip
        of_vllm = {"mode": fn.__name__, "clip_min": bounds.get("low"), "clip_max": bounds["high"]}
        settings = {"loss_type": "dapo", **{f"vllm_importance_sampling_{k}": v for k, v in of_vllm.items()}}
        weight, _ = fn(reduce.masked(r["logp"] - b.logp_gen, trained(r)), trained(r), **bounds)
        yield Case(f"{fn.__name__} x ppo_clip, token_mean", "GRPO", settings, partial(theirs, settings), partial(ours, b, r, weight=weight))


def advantage_cases(b: Batch) -> Iterator[Case]:
    total, groups = b.reward.sum(1), [range(i, i + GROUP) for i in range(0, ROLLOUTS, GROUP)]
    same = torch.full((7,), 0.7)

    def case(name: str, kind: str, settings: Settings, reward: Tensor, *ours: Callable[[], Tensor]) -> Case:
        return Case(name, kind, settings, lambda: (generated(b, kind, settings, reward)[1]["advantages"], []), *ours)

    def with_kl() -> Tensor:
        r = {k: v for k, v in b.rollouts.items() if k != "tool_mask"}
        k1 = penalties.k1(r["logp"], rollout_logp(b.ref, r)[1].detach())
        return by_group(advantages.leave_one_out, returns.shape_rewards(total, k1, trained(r), coef=0.1).sum(1))

    one = total[:, None]
    yield case("standardize", "GRPO", {"scale_rewards": "group"}, one, partial(by_group, advantages.standardize, total))
    yield case("standardize, seven rewards of 0.7", "GRPO", {"num_generations": 7}, same[:, None],
               partial(advantages.standardize, same), lambda: (same - same.mean()) / (same.std() + 1e-4))  # fmt: skip
    yield case("standardize_by_batch", "GRPO", {"scale_rewards": "batch"}, one, partial(advantages.standardize_by_batch, total, groups))
    yield case("standardize_each", "GRPO", {"multi_objective_aggregation": "normalize_then_sum"}, b.reward,
               partial(advantages.standardize_each, b.reward, groups, weights=[1.0, 1.0]))  # fmt: skip
    yield case("center", "GRPO", {"scale_rewards": "none"}, one, partial(by_group, advantages.center, total))
    yield case("leave_one_out", "RLOO", {"beta": 0.0}, one, partial(by_group, advantages.leave_one_out, total))
    yield case("leave_one_out of shape_rewards with k1", "RLOO", {"beta": 0.1}, one, with_kl)


def dpo_cases(b: Batch) -> Iterator[Case]:
    losses, half = preference_losses, partial(pair_loss, b, beta=0.1)

    def case(name: str, settings: Settings, ours: Callable[[], Tensor], their_way: Callable[[], Tensor] | None = None) -> Case:
        settings = {"beta": 0.1} | settings
        return Case(f"dpo: {name}", "DPO", settings, partial(computed, b, "DPO", settings, b.pairs), ours, their_way)

    smooth = {"label_smoothing": 0.1}
    for name, ours, theirs in (
        ("sigmoid", {}, {}), ("sigmoid_norm", {}, {}), ("hinge", {}, {}), ("robust", smooth, smooth), ("exo_pair", smooth, smooth),
        ("ipo", {"length_normalize": True}, {}), ("bco_pair", {"delta": 0.0}, {}), ("nca_pair", {}, {}),
        ("sppo_hard", {"beta": 2.0}, {"beta": 2.0}), ("aot", smooth, smooth), ("aot_unpaired", smooth, smooth),
        ("apo_zero", {}, {}), ("apo_down", {}, {}), ("discopop", {"tau": 0.05}, {"discopop_tau": 0.05}),
    ):  # fmt: skip
        text = "".join(f", {k} {v}" for k, v in ours.items() if k != "beta")
        yield case(name + text, {"loss_type": [name], **theirs}, partial(half, getattr(losses, name), **ours))
    for name, theirs in (("forward_kl", "forward_kl"), ("js", "js_divergence")):
        yield case(f"sigmoid, f_divergence {name}", {"f_divergence_type": theirs}, partial(half, losses.sigmoid, f_divergence=name))
    yield case("sigmoid, f_divergence alpha, alpha 0.5", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
               partial(half, losses.sigmoid, f_divergence="alpha", alpha=0.5))  # fmt: skip
    yield case("sigmoid of length_desensitized, alpha 0.4", {"ld_alpha": 0.4}, partial(half, losses.sigmoid, ld_alpha=0.4))
    yield case("sigmoid, label_smoothing 0.1", smooth, partial(half, losses.sigmoid, **smooth), partial(half, losses.sigmoid))
    yield case("ipo, length_normalize False", {"loss_type": ["ipo"]}, partial(half, losses.ipo, length_normalize=False),
               partial(half, losses.ipo, length_normalize=True))  # fmt: skip
    yield case("bco_pair, running delta", {"loss_type": ["bco_pair"]}, partial(_shifted_bco, b), partial(half, losses.bco_pair, delta=0.0))
    mixture = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    by_token, by_example = (lambda kind=kind: half(losses.sigmoid) + 0.5 * nll(b, kind) for kind in ("token_mean", "example_mean"))
    yield case("sigmoid + nll, token_mean", mixture, by_token)
    yield case("sigmoid + nll, example_mean", mixture, by_example, by_token)
    yield case("sigmoid x likelihood_weight", {"use_weighting": True}, partial(_weighted, b))


def _shifted_bco(b: Batch) -> Tensor:
    c = pair_columns(b)
    rewards = (preference_terms.rewards_of(c[f"cur_{side}"], c[f"ref_{side}"], beta=0.1) for side in ("chosen", "rejected"))
    return named(preference_losses.bco_pair, c, beta=0.1, delta=preference_terms.RunningReward().update(*rewards)).mean()


def _weighted(b: Batch) -> Tensor:
    """DPO times WPO's weight."""
    c = pair_columns(b)
    with torch.no_grad():
        logits = b.policy(input_ids=b.pairs["input_ids"], attention_mask=b.pairs["attention_mask"]).logits[:, :-1]
        _, mask = answer_logp(b.policy, b.pairs)
        expected = reduce.masked((2 * logits.log_softmax(-1)).logsumexp(-1), mask).sum(1)
    weight = named(preference_terms.likelihood_weight, c | {"expected_chosen": expected[:PAIRS], "expected_rejected": expected[PAIRS:]})
    return (named(preference_losses.sigmoid, c, beta=0.1) * weight).mean()


def reference_free_cases(b: Batch) -> Iterator[Case]:
    losses, half = preference_losses, partial(pair_loss, b)
    labels = torch.where(b.pairs["completion_mask"].bool(), b.pairs["input_ids"], -100)
    inputs = {}
    for side, rows in (("chosen", slice(PAIRS)), ("rejected", slice(PAIRS, None))):
        inputs |= {f"{side}_{k}": b.pairs[k][rows] for k in ("input_ids", "attention_mask")} | {f"{side}_labels": labels[rows]}

    thirds = {k: torch.cat([v, v[:PAIRS]]) for k, v in b.pairs.items()}             # TPO's third answer is the chosen one here

    def case(name: str, kind: str, settings: Settings, ours: Callable[[], Tensor], their_way: Callable[[], Tensor] | None = None) -> Case:
        given = inputs if kind != "TPO" else thirds if settings["tpo_alpha"] else b.pairs
        return Case(f"{kind.lower()}: {name}", kind, settings, partial(computed, b, kind, settings, given), ours, their_way)

    alone, smooth = {"beta": 0.1, "cpo_alpha": 0.0}, {"label_smoothing": 0.1}
    yield case("cpo, label_smoothing 0.1", "CPO", alone | smooth, partial(half, losses.cpo, beta=0.1, **smooth))
    yield case("slic, delta 10, x 0.1", "CPO", alone | {"loss_type": "hinge"}, lambda: 0.1 * half(losses.slic, delta=10.0))
    yield case("simpo, label_smoothing 0.1", "CPO", alone | smooth | {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5},
               partial(half, losses.simpo, beta=2.0, gamma=0.5, **smooth))  # fmt: skip
    by_token, by_answer = (lambda kind=kind: half(losses.cpo, beta=0.1) + nll(b, kind) for kind in ("token_mean", "sequence_sum"))
    yield case("cpo + nll, token_mean", "CPO", {"beta": 0.1, "cpo_alpha": 1.0}, by_token)
    yield case("cpo + nll, sequence_sum", "CPO", {"beta": 0.1, "cpo_alpha": 1.0}, by_answer, by_token)
    yield case("simpo", "TPO", {"loss_type": "tpo-l", "beta": 2.0, "tpo_l_gamma": 0.5, "tpo_alpha": 0.0},
               partial(half, losses.simpo, beta=2.0, gamma=0.5))  # fmt: skip
    yield case("cpo + nll of a third answer, token_mean", "TPO", {"beta": 0.1, "tpo_alpha": 1.0}, by_token)
    yield case("orpo + nll, example_mean", "ORPO", {"beta": 0.1}, lambda: 0.1 * half(losses.orpo) + nll(b, "example_mean"),
               lambda: 0.1 * half(losses.orpo) + nll(b, "token_mean", with_prompt=True))  # fmt: skip


def kto_cases(b: Batch) -> Iterator[Case]:
    inputs = {**b.pairs, **{f"KL_{k}": v for k, v in b.mismatched.items()}, "label": b.desirable}
    weights = {"beta": 0.1, "desirable_weight": 1.2, "undesirable_weight": 0.8}

    def total(model: nn.Module, answers: dict[str, Tensor]) -> Tensor:
        return preference_terms.sequence_logprob(*answer_logp(model, answers))

    def ours(with_kl: bool) -> Tensor:
        kl = preference_losses.kto_baseline(total(b.policy, b.mismatched), total(b.ref, b.mismatched)) if with_kl else torch.zeros(())
        return preference_losses.kto(total(b.policy, b.pairs), total(b.ref, b.pairs).detach(), b.desirable, kl, **weights).mean()

    for name, loss_type, with_kl in (("kto", "kto", True), ("kto, kl 0", "apo_zero_unpaired", False)):
        settings = {"loss_type": loss_type, **weights}
        yield Case(f"kto: {name}", "KTO", settings, partial(computed, b, "KTO", settings, inputs), partial(ours, with_kl))


def online_cases(b: Batch) -> Iterator[Case]:
    """Two completions a prompt; TRL's training_step with sampling and rewards put in."""
    half = ROLLOUTS // 2
    r = b.rollouts | {k: torch.cat([b.rollouts[k][:half]] * 2) for k in ("prompt_ids", "prompt_mask")}
    del r["tool_mask"]

    def theirs(settings: Settings, reward: Tensor) -> Outcome:
        t = trainer(b, "OnlineDPO", settings)
        t._generate = lambda *_: (*(r[k] for k in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")), None)
        t._calculate_rewards_from_functions = lambda **_: reward
        return t.training_step(t.model, {"prompt": ["w1"] * half}), [p.grad for p in t.model.parameters()]

    def ours(pairs: list[tuple[int, int]], loss: Callable[..., Tensor], **settings: Any) -> Tensor:
        c = {}
        for name, model in (("cur", b.policy), ("ref", b.ref)):
            total = preference_terms.sequence_logprob(rollout_logp(model, r)[1], trained(r))
            for side, rows in zip(("chosen", "rejected"), zip(*pairs, strict=True), strict=True):
                c |= {f"{name}_{side}": total[list(rows)], f"tokens_{side}": trained(r)[list(rows)].sum(1)}
        return named(loss, c, beta=0.1, **settings).mean()

    def case(name: str, loss_type: str, reward: Tensor, *ours_: Callable[[], Tensor]) -> Case:
        settings = {"loss_type": loss_type, "beta": 0.1}
        return Case(f"best_and_worst, {name}", "OnlineDPO", settings, partial(theirs, settings, reward), *ours_)

    reward, groups = b.reward[:, 0], [(i, i + half) for i in range(half)]
    tied = reward.index_copy(0, torch.tensor([1 + half]), reward[1:2])
    first = [pair if tied[pair[0]] >= tied[pair[1]] else pair[::-1] for pair in groups]
    best, dpo, ipo = preference_terms.best_and_worst, preference_losses.sigmoid, preference_losses.ipo
    yield case("sigmoid", "sigmoid", reward, lambda: ours(best(reward, groups), dpo))
    yield case("ipo, length_normalize False", "ipo", reward, lambda: ours(best(reward, groups), ipo, length_normalize=False))
    yield case("sigmoid, equal rewards", "sigmoid", tied, lambda: ours(best(tied, groups), dpo), lambda: ours(first, dpo))


def reward_cases(b: Batch) -> Iterator[Case]:
    plain = {k: b.pairs[k] for k in ("input_ids", "attention_mask")}

    def ours(margin: Tensor | None, centre: float) -> Tensor:
        chosen, rejected = b.scorer(**plain).logits.squeeze(-1).chunk(2)
        pairs = reward_losses.bradley_terry(chosen, rejected, margin=margin) + centre * reward_losses.centering(chosen, rejected)
        return pairs.mean()

    for name, margin, centre in (
        ("bradley_terry", None, 0.0), ("bradley_terry, margin", b.margin, 0.0), ("bradley_terry + centering", None, 0.1)
    ):  # fmt: skip
        settings = {"center_rewards_coefficient": centre} if centre else {}
        inputs = plain if margin is None else plain | {"margin": margin}
        yield Case(name, "Reward", settings, partial(computed, b, "Reward", settings, inputs), partial(ours, margin, centre))


def token_cases(b: Batch) -> Iterator[Case]:
    plain = {k: b.pairs[k] for k in ("input_ids", "attention_mask")}
    mask = b.pairs["completion_mask"][:, 1:].bool()
    labelled = plain | {"labels": torch.where(b.pairs["completion_mask"].bool(), b.pairs["input_ids"], -100)}
    parts = [rows_of(labelled, slice(0, 4)), rows_of(labelled, slice(4, None))]

    def supervised(loss: Callable[..., Tensor]) -> Tensor:
        return reduce.token_mean(loss(answer_logp(b.policy, b.pairs)[0]), mask, **counts(mask))

    def distilled(logits: Callable[[nn.Module], Tensor], mask: Tensor, **settings: float) -> Tensor:
        return reduce.token_mean(divergences.generalized_jsd(logits(b.policy), logits(b.teacher), **settings), mask, **counts(mask))

    for name, loss, loss_type in (("cross_entropy", token_losses.cross_entropy, "nll"), ("dft", token_losses.dft, "dft")):
        theirs = partial(computed, b, "SFT", {"loss_type": loss_type}, *parts, num_items_in_batch=int(mask.sum()))
        yield Case(f"{name}, token_mean, two micro-batches", "SFT", {"loss_type": loss_type}, theirs, partial(supervised, loss))
    for beta in (0.0, 0.1, 0.5, 1.0):
        ours = partial(distilled, lambda m: m(**plain).logits[:, :-1], mask, beta=beta, temperature=1.0)
        yield Case(f"generalized_jsd, beta {beta}", "GKD", {"beta": beta}, partial(computed, b, "GKD", {"beta": beta}, labelled), ours)
    for beta in (0.0, 0.5, 1.0):
        settings = {"beta": beta, "temperature": 2.0}
        ours = partial(distilled, lambda m: rollout_logp(m, b.rollouts)[0], trained(b.rollouts), **settings)
        theirs = partial(computed, b, "Distillation", settings, b.rollouts)
        yield Case(f"generalized_jsd, beta {beta}, temperature 2", "Distillation", settings, theirs, ours)


FAMILIES = {
    "Policy losses": [policy_cases], "Corrections": [correction_cases], "Advantages": [advantage_cases],
    "Preference losses": [dpo_cases, reference_free_cases, kto_cases, online_cases], "Reward models": [reward_cases],
    "Supervised fine-tuning and distillation": [token_cases],
}  # fmt: skip


# the table


@dataclass
class Line:
    """The largest differences of a case over all batches; None where there is nothing to compare."""

    name: str
    trl: str
    value: float = 0.0
    gradient: float | None = None
    size: float = 0.0                                          # largest entry of burnish's gradient
    as_trl: float | None = None                                # what is left with `their_way`

    @property
    def tolerance(self) -> float:
        return TOLERANCE * max(1.0, self.size)

    @property
    def gap(self) -> float:
        return max(self.value, self.gradient or 0.0)

    @property
    def why(self) -> str:
        """Empty where there is nothing to explain."""
        if self.gap <= TOLERANCE:
            return ""
        return EXPLAINED.get(self.name, "NOT EXPLAINED" if self.gap > self.tolerance else ROUNDING)

    def fault(self) -> str | None:
        if self.why == "NOT EXPLAINED":
            return f"{self.name}: a difference of {_shown(self.gap)} without an explanation"
        if self.name in EXPLAINED and not self.why:
            return f"{self.name}: explained, but the difference is {_shown(self.gap)}"
        if (self.as_trl or 0.0) > self.tolerance:
            return f"{self.name}: put together as TRL does it, still {_shown(self.as_trl)} apart"
        return None

    def cells(self) -> list[str]:
        return [_shown(self.value), _shown(self.gradient), "" if self.gradient is None else f"{self.size:.1g}", _shown(self.as_trl)]


def _shown(x: float | None) -> str:
    return "" if x is None else "NaN" if x == float("inf") else "0" if x == 0 else f"{x:.0e}"


def _gap(a: Outcome, b: Outcome) -> list[float]:
    """The largest difference of values, then of each parameter's gradients; a NaN on one side counts as inf."""
    gaps = [(x.detach() - y.detach()).abs().max() for x, y in zip((a[0], *a[1]), (b[0], *b[1]), strict=True)]
    return [float(gap.nan_to_num(nan=float("inf"))) for gap in gaps]


def measure(case: Case, line: Line, b: Batch) -> None:
    model = b.scorer if case.kind == "Reward" else b.policy
    theirs, ours = case.theirs(), gradient(case.ours(), model)
    value, *grads = _gap(ours, theirs)
    line.value = max(line.value, value)
    if grads:
        line.gradient = max(line.gradient or 0.0, *grads)
        line.size = max(line.size, *(float(g.abs().max()) for g in ours[1]))
    if case.their_way:
        line.as_trl = max(line.as_trl or 0.0, *_gap(gradient(case.their_way(), model), theirs))


def compare(num_batches: int, only: str) -> dict[str, list[Line]]:
    tables: dict[str, dict[str, Line]] = {family: {} for family in FAMILIES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(num_batches):
            b = Batch(seed, folder)
            for family, makers in FAMILIES.items():
                for case in (case for cases in makers for case in cases(b) if re.search(only, case.name)):
                    trl = " ".join(f"{k}={v}" for k, v in case.settings.items() if v is not None)
                    measure(case, tables[family].setdefault(case.name, Line(case.name, f"{case.kind} {trl}".strip())), b)
    return {family: list(lines.values()) for family, lines in tables.items() if lines}


def as_text(tables: dict[str, list[Line]]) -> str:
    out = []
    width = max(len(line.name) for lines in tables.values() for line in lines)
    for family, lines in tables.items():
        out.append(f"\n{family:{width}}    value gradient of up to   as TRL")
        for line in lines:
            out.append(f"{line.name:{width}}" + "".join(f"{cell:>9}" for cell in line.cells()) + f"  {line.trl}")
            if line.why:
                out.append(f"  -> {line.why}")
    return "\n".join(out)


def as_markdown(tables: dict[str, list[Line]], num_batches: int) -> str:
    out = []
    for family, lines in tables.items():
        out += [f"\n### {family}\n", "| burnish | TRL | value | gradient | of up to |", "|---|---|---|---|---|"]
        for line in lines:
            cells = line.cells()[:3]
            name = f"**{line.name}**" if line.why else line.name
            out.append("| " + " | ".join([name, f"`{line.trl}`", *cells]) + " |")
    out += ["\n### The differences\n", "| line | left when put together as TRL does it | who is right, and why |", "|---|---|---|"]
    out += [f"| {line.name} | {_shown(line.as_trl)} | {line.why} |" for lines in tables.values() for line in lines if line.why]
    versions = f"trl {trl.__version__}, torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    head = f"{sum(map(len, tables.values()))} lines, each over {num_batches} batches; {versions}."
    return "\n".join([head, *out, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--batches", type=int, default=3, help="how many batches, each with weights and tokens of its own (3)")
    parser.add_argument("--only", default="", metavar="REGEX", help="only the lines whose name matches")
    parser.add_argument("--write", type=Path, metavar="PAGE", help=f"put the table into this page, between {START} and {END}")
    args = parser.parse_args()
    if args.batches < 1 or (args.write and args.only):
        parser.error("--batches must be at least 1, and --write wants the whole table, so no --only")
    page = args.write and args.write.is_file() and args.write.read_text()
    if args.write and not (page and START in page and END in page):
        parser.error(f"{args.write} is no page with {START} and {END} in it")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    datasets.disable_progress_bars()
    disable_progress_bar()
    torch.set_num_threads(1)                                   # the tensors are tiny
    tables = compare(args.batches, args.only)
    if not tables:
        parser.error(f"no line matches {args.only!r}")
    faults = [fault for lines in tables.values() for line in lines if (fault := line.fault())]
    print("\n".join([as_text(tables), "", *faults]))
    if page and not faults:
        args.write.write_text(page[: page.index(START) + len(START)] + "\n" + as_markdown(tables, args.batches) + page[page.index(END) :])
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
