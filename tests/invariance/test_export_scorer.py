"""T17 for models of scores: what is exported gives equal scores in plain transformers, alone, in a batch and padded on either side."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import ALPHABET, TINY, tiny_settings
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from burnish.chat.template import encode_answer
from burnish.config import Lora, Model, Scratch
from burnish.models.export import export
from burnish.models.heads import Scorer, add_thresholds, name_pad_token
from burnish.models.load import ModelError, inspect, load_scorer
from burnish.models.scratch import build_tokenizer

TEXTS = [("12+3=", "15"), ("7", ""), ("a longer prompt:\n", "and a longer answer, with words"), ("12+3=", "16")]


def made(name: str, *, outputs: int = 1, lora: Lora | None = None):
    """A scorer with weights of every kind away from their start."""
    loaded = load_scorer(tiny_settings(name, lora=lora), seed=0, outputs=outputs)
    name_pad_token(loaded.module, loaded.tokenizer, end_token_ids=[loaded.tokenizer.eos_token_id])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for p in loaded.module.parameters():
            if p.requires_grad:
                p.data += 0.05 * torch.randn_like(p)
    return loaded


def tokens_of(loaded) -> list[list[int]]:
    return [encode_answer(loaded.tokenizer, prompt, answer, end=loaded.tokenizer.eos_token_id)[0] for prompt, answer in TEXTS]


@torch.no_grad()
def scores_of(loaded) -> torch.Tensor:
    scorer = Scorer(loaded.module)
    return torch.stack([scorer.scores(scorer.hidden(torch.tensor([tokens]))[0, -1]).reshape(-1) for tokens in tokens_of(loaded)])


@torch.no_grad()
def plain_scores(folder, side: str) -> torch.Tensor:
    """By plain transformers, from the texts: one batch, padded by its own tokenizer."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = [prompt + answer + tokenizer.eos_token for prompt, answer in TEXTS]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False, **({"padding_side": side} if side else {}))
    if side == "left":      # positions that count from the text's start, for architectures with absolute ones
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return model(**{k: v for k, v in batch.items() if k != "token_type_ids"}).logits


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("name", TINY)
def test_scores_are_equal_in_plain_transformers(name, lora, tmp_path):
    loaded = made(name, lora=lora)
    before = {n: p.detach().clone() for n, p in loaded.module.state_dict().items()}
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=())
    assert all(torch.equal(before[n], p) for n, p in loaded.module.state_dict().items())
    expected = scores_of(loaded)
    assert len(set(expected.flatten().tolist())) == len(TEXTS)
    for side in ("", "right", "left"):
        torch.testing.assert_close(plain_scores(tmp_path / "model", side), expected, rtol=1e-4, atol=2e-5)
    held = load_file(tmp_path / "model" / "model.safetensors")
    assert "score.weight" in held and not any("lora" in n or "modules_to_save" in n or "lm_head" in n for n in held)
    assert not (tmp_path / "model" / "generation_config.json").exists()


def test_several_outputs_and_the_way_back(tmp_path):
    loaded = made("llama", outputs=3)
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=())
    torch.testing.assert_close(plain_scores(tmp_path / "model", "right"), scores_of(loaded), rtol=1e-4, atol=1e-5)
    assert inspect(Model(path=str(tmp_path / "model"))).outputs == 3
    again = load_scorer(Model(path=str(tmp_path / "model")), seed=5, outputs=None)
    torch.testing.assert_close(scores_of(again), scores_of(loaded), rtol=0, atol=0)
    with pytest.raises(ModelError, match="as a body for scores"):
        load_scorer(Model(path=str(tmp_path / "model")), seed=0, outputs=2)


def test_a_causal_model_is_no_reward_model_and_does_not_become_one_by_random_weights(make_tiny, tmp_path):
    loaded = make_tiny("llama")
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=())
    path = Model(path=str(tmp_path / "model"))
    assert inspect(path).outputs is None
    with pytest.raises(ModelError, match=r"lacks 1 weights .*score.*folder of a reward model"):
        load_scorer(path, seed=0, outputs=None)
    assert float(load_scorer(path, seed=0).module.score.weight.abs().max()) == 0


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["full", "lora"])
def test_thresholds_travel_in_the_configuration(tmp_path, lora):
    loaded = made("llama", lora=lora)
    thresholds = add_thresholds(loaded.module, classes=4)
    torch.testing.assert_close(thresholds(), torch.logit(torch.tensor([0.25, 0.5, 0.75])))
    with torch.no_grad():
        thresholds.first_and_log_gaps += torch.tensor([0.3, -0.2, 0.1])
    trained = thresholds().tolist()
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=())
    assert json.loads((tmp_path / "model" / "config.json").read_text())["thresholds"] == trained
    torch.testing.assert_close(plain_scores(tmp_path / "model", "right"), scores_of(loaded), rtol=1e-4, atol=2e-5)
    again = load_scorer(Model(path=str(tmp_path / "model")), seed=0)
    assert add_thresholds(again.module, classes=4)().tolist() == pytest.approx(trained, abs=1e-6)
    with pytest.raises(ModelError, match=r"reward_model\.classes is 3, but the model was trained for 4 classes"):
        add_thresholds(again.module, classes=3)


# the pad token

def tokenizer_of(**tokens):
    tokenizer = build_tokenizer(ALPHABET)
    tokenizer.pad_token = None
    for name, token in tokens.items():
        if token not in tokenizer.get_vocab():
            tokenizer.add_special_tokens({"additional_special_tokens": [token]})
        setattr(tokenizer, name, token)
    return tokenizer


@pytest.mark.parametrize(("tokens", "expected"), [
    ({"pad_token": "<pad>"}, "<pad>"),
    ({"pad_token": "<end>", "unk_token": "<unk>"}, "<unk>"),
    ({"pad_token": "<end>", "bos_token": "<unk>", "unk_token": "<unk>"}, "<pad>"),
    ({}, "<pad>"),
])
def test_a_pad_token_that_ends_no_answer(tokens, expected):
    tokenizer = tokenizer_of(**tokens)
    loaded = load_scorer(tiny_settings("llama"), seed=0)
    name_pad_token(loaded.module, tokenizer, end_token_ids=[1])
    assert tokenizer.pad_token == expected
    assert tokenizer.pad_token_id == loaded.module.config.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.padding_side == "right"


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["full", "lora"])
def test_a_vocabulary_without_one_to_spare_gets_one(tmp_path, lora):
    """As GPT-2's, whose only special token ends the text: it gets <pad>, and the model a row for it."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(("<end>", "@", *ALPHABET))}))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", bos_token="<end>", unk_token="<end>")
    loaded = load_scorer(tiny_settings("gpt2", lora=lora), seed=0)
    width = loaded.module.get_input_embeddings().weight.shape[0]
    assert width == len(tokenizer)
    name_pad_token(loaded.module, tokenizer, end_token_ids=[0])
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<pad>", width)
    assert loaded.module.get_input_embeddings().weight.requires_grad == (lora is None)
    with torch.no_grad():
        Scorer(loaded.module).head.weight.normal_()
    export(loaded.module, tokenizer, tmp_path / "model", end_token_ids=[0], stop=())
    expected = scores_of(SimpleNamespace(module=loaded.module, tokenizer=tokenizer))
    torch.testing.assert_close(plain_scores(tmp_path / "model", ""), expected, rtol=1e-4, atol=2e-5)


def test_scores_of_a_chat_model_whose_pad_token_is_its_end_token(tmp_path):
    """SmolLM2 pads with <|im_end|>: plain transformers would score the token before it."""
    tokenizer = tokenizer_of(pad_token="<end>", unk_token="<unk>")
    settings = Model(scratch=Scratch(alphabet=ALPHABET + "@", model_type="llama", config=TINY["llama"][1]))
    loaded = load_scorer(settings, seed=0)
    name_pad_token(loaded.module, tokenizer, end_token_ids=[1])
    with torch.no_grad():
        loaded.module.score.weight.normal_()
    export(loaded.module, tokenizer, tmp_path / "model", end_token_ids=[1], stop=())
    expected = scores_of(SimpleNamespace(module=loaded.module, tokenizer=tokenizer))
    torch.testing.assert_close(plain_scores(tmp_path / "model", ""), expected, rtol=1e-4, atol=2e-5)
