"""T17: an exported folder in plain transformers gives the logits of the module in memory, and stops where training stopped."""

from __future__ import annotations

import json
import os
import stat

import pytest
import torch
from conftest import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.config import Lora, Model
from burnish.models.export import export
from burnish.models.load import ModelError, load

TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def perturb(module, scale=0.05):
    """As training does: move every trainable weight."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def halve(module):
    """Parameters to bfloat16; module.to would round the rotary frequencies too, which no loader does."""
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    return module


def logits_of(module, num_tokens=50):
    tokens = torch.randint(0, num_tokens, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return module(tokens).logits


def snapshot(module):
    return {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in module.state_dict().items()}


def assert_unchanged(module, before):
    after = module.state_dict()
    assert after.keys() == before.keys()
    for name, (address, tensor) in before.items():
        assert after[name].data_ptr() == address, name
        assert torch.equal(after[name], tensor), name


def tie_of(module):
    return module.get_output_embeddings().weight is module.get_input_embeddings().weight


@pytest.mark.parametrize("name", TINY)
def test_logits_are_equal_bit_for_bit(name, make_tiny, tmp_path):
    loaded = make_tiny(name)
    perturb(loaded.module)
    before, config = snapshot(loaded.module), loaded.module.config.to_dict()
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=[])
    assert_unchanged(loaded.module, before)
    assert loaded.module.config.to_dict() == config

    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    assert torch.equal(logits_of(plain), logits_of(loaded.module))
    assert tie_of(plain) == tie_of(loaded.module)
    again = load(Model(path=str(tmp_path / "model")), seed=9)
    assert torch.equal(logits_of(again.module), logits_of(loaded.module))


@pytest.mark.parametrize(("name", "targets"), [
    ("llama", "all-linear"), ("llama_tied", ("q_proj", "down_proj")), ("gpt2", "all-linear"), ("qwen3", ("v_proj",)),
    ("gemma3", "all-linear"), ("mixtral", "all-linear"), ("qwen3_moe", "all-linear"),
    ("llama_tied", ("lm_head",)), ("llama_tied", ("embed_tokens", "q_proj")),
])
def test_lora_is_merged(name, targets, make_tiny, tmp_path):
    dropout = 0.0 if name in ("mixtral", "qwen3_moe") else 0.1
    loaded = make_tiny(name, lora=Lora(rank=4, targets=targets, dropout=dropout))
    perturb(loaded.module)
    before, expected = snapshot(loaded.module), logits_of(loaded.module)
    grads = [p.requires_grad for p in loaded.module.parameters()]
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=[])
    assert_unchanged(loaded.module, before)
    assert [p.requires_grad for p in loaded.module.parameters()] == grads
    assert torch.equal(logits_of(loaded.module), expected)

    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    assert not (tmp_path / "model" / "adapter_config.json").exists()
    with loaded.module.disable_adapter():
        without = logits_of(loaded.module)
    assert (expected - without).abs().max() > 0.05
    torch.testing.assert_close(logits_of(plain), expected, rtol=1e-4, atol=1e-4)


def test_untrained_lora_is_the_base_bit_for_bit(make_tiny, tmp_path):
    base, loaded = make_tiny("llama_tied"), make_tiny("llama_tied", lora=Lora(rank=4))
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=[])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits_of(plain), logits_of(base.module))
    assert tie_of(plain)


@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
def test_a_bfloat16_module_says_so(name, make_tiny, tmp_path):
    loaded = make_tiny(name)
    module = halve(loaded.module)
    export(module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=[])
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    assert torch.equal(logits_of(plain), logits_of(module))


def test_mixed_precision_is_written_as_float32(make_tiny, tmp_path):
    loaded = make_tiny("llama")
    module = halve(loaded.module)
    module.model.norm.float()
    export(module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=[])
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert {t.dtype for t in plain.values()} == {torch.float32}
    assert all(torch.equal(plain[name], tensor.float()) for name, tensor in module.state_dict().items())


def test_tokenizer_and_template_are_equal(make_tiny, tmp_path):
    loaded = make_tiny("llama")
    loaded.tokenizer.chat_template = TEMPLATE
    loaded.tokenizer.save_pretrained(tmp_path / "before")
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=[])
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "model" / file.name).read_bytes() == file.read_bytes(), file.name
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "u", "content": "1+2=?"}]
    render = {"add_generation_prompt": True, "return_dict": False}
    assert again.chat_template == TEMPLATE
    assert again.apply_chat_template(messages, **render) == loaded.tokenizer.apply_chat_template(messages, **render)


@pytest.mark.parametrize("name", ["llama_tied", "llama", "gpt2"])
def test_added_tokens(name, make_tiny, tmp_path):
    loaded = make_tiny(name)
    loaded.tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    loaded.module.resize_token_embeddings(len(loaded.tokenizer))
    perturb(loaded.module)
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[len(loaded.tokenizer) - 1], stop=[])
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.encode("<think>1</think>") == loaded.tokenizer.encode("<think>1</think>")
    assert plain.config.vocab_size == len(tokenizer) == len(loaded.tokenizer)
    assert torch.equal(logits_of(plain, len(tokenizer)), logits_of(loaded.module, len(tokenizer)))


def test_generation_stops_at_the_trained_token(make_tiny, tmp_path):
    loaded = make_tiny("llama")
    perturb(loaded.module, 0.5)
    prompt = torch.tensor([[5, 6, 7]])
    free = loaded.module.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 3:].tolist()
    end = free[4]
    first = free.index(end)
    never = next(t for t in range(2, 60) if t not in free)
    loaded.module.generation_config.update(temperature=0.3, do_sample=True, top_k=5, max_length=3)
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[end, never], stop=[])

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert plain.generation_config.eos_token_id == [end, never]
    assert plain.config.eos_token_id == [end, never]
    assert plain.generation_config.do_sample is False
    assert plain.generation_config.temperature in (None, 1.0)
    assert plain.generate(prompt, max_new_tokens=40)[0, 3:].tolist() == free[: first + 1]


def test_generation_without_the_end_token_of_the_start(make_tiny, tmp_path):
    loaded = make_tiny("llama")
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[40], stop=[])
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config
    assert config.eos_token_id == [40]
    assert config.pad_token_id == 0


def test_generation_stops_at_the_trained_text(make_tiny, tmp_path):
    loaded = make_tiny("llama")
    perturb(loaded.module, 0.5)
    prompt = torch.tensor([[5, 6, 7]])
    free = loaded.module.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 3:].tolist()
    text = loaded.tokenizer.decode(free)
    stop = text[5:7]
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[], stop=[stop])
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), AutoTokenizer.from_pretrained(tmp_path / "model")
    got = tokenizer.decode(plain.generate(prompt, max_new_tokens=30, tokenizer=tokenizer)[0, 3:])
    assert got == text[: text.index(stop) + len(stop)]
    assert plain.generation_config.eos_token_id is None


def test_a_model_folder_is_replaced_and_other_folders_are_not(make_tiny, tmp_path):
    one, two = make_tiny("llama", seed=1), make_tiny("llama", seed=2)
    for loaded in (one, two):
        export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=[])
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), logits_of(two.module))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelError, match="holds no model"):
        export(one.module, one.tokenizer, tmp_path / "mine", end_token_ids=[1], stop=[])
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_failing_export_leaves_the_old_model(make_tiny, tmp_path, monkeypatch):
    one, two = make_tiny("llama", seed=1), make_tiny("llama", seed=2)
    export(one.module, one.tokenizer, tmp_path / "model", end_token_ids=[1], stop=[])

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(two.tokenizer), "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        export(two.module, two.tokenizer, tmp_path / "model", end_token_ids=[1], stop=[])
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), logits_of(one.module))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_weights_may_be_read_by_whoever_may_read_the_configuration(tiny_llama, tmp_path):
    export(tiny_llama.module, tiny_llama.tokenizer, tmp_path / "model", end_token_ids=[1], stop=[])
    modes = {stat.S_IMODE(os.stat(tmp_path / "model" / name).st_mode) for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1


def test_small_changes_by_lora_survive_bfloat16(make_tiny, tmp_path):
    """What is written is base plus the adapter's change, not the base: half a bfloat16 step is larger than most changes."""
    loaded = make_tiny("llama", lora=Lora(rank=4))
    for name, p in loaded.module.named_parameters():
        p.data = p.data.to(torch.bfloat16)
        if "lora_B" in name:
            p.data.normal_(std=1e-3)
    base = {n: t.clone() for n, t in loaded.module.get_base_model().state_dict().items()}
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=())
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    layer = loaded.module.get_base_model().model.layers[0].mlp.down_proj
    wanted = layer.get_delta_weight("default").float()
    got = written["model.layers.0.mlp.down_proj.weight"].float() - base["model.layers.0.mlp.down_proj.base_layer.weight"].float()
    assert float((got - wanted).norm() / wanted.norm()) < 0.01


def test_a_stop_of_one_character_needs_no_tokenizer(make_tiny, tmp_path):
    loaded = make_tiny("llama")
    export(loaded.module, loaded.tokenizer, tmp_path / "model", end_token_ids=[1], stop=["\n"])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    newline = loaded.tokenizer("\n").input_ids[0]
    assert plain.generation_config.eos_token_id == [1, newline]
    assert plain.generation_config.stop_strings is None
