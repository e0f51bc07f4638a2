"""How fast vLLM generates, as a peer to compare with. Run by the Python of an environment with vLLM (`make test-vllm` makes one):

    .venv-vllm/bin/python bench/peers/vllm_generate.py work.json

work.json: {"model": folder, "dtype": "bfloat16", "prompts": [[token ids], ...], "max_new_tokens": 64}; optional "seed" (0), "logprobs"
(true), "repeats" (3) and "options", arguments of vllm.LLM. Every prompt gets all of max_new_tokens, drawn at temperature 1.

Prints one line of JSON as its last: seconds of each timed run and their median, tokens of prompts and of completions, and both together a
second. Two untimed runs go before: the first compiles, with the prefix cache off nothing of them is left. Run it alone on the machine.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path


def main(file: str) -> None:
    work = json.loads(Path(file).read_text())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))     # else vLLM takes one thread for what torch computes
    import vllm

    prompts, new = work["prompts"], work["max_new_tokens"]
    start_s = time.perf_counter()
    llm = vllm.LLM(**{
        "model": work["model"], "dtype": work["dtype"], "generation_config": "vllm", "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": False, "max_num_seqs": max(len(prompts), 1), "max_model_len": max(map(len, prompts)) + new,
        "seed": work.get("seed", 0), "disable_log_stats": True, **work.get("options", {}),
    })
    start_s = time.perf_counter() - start_s
    params = [
        vllm.SamplingParams(
            temperature=1.0, max_tokens=new, ignore_eos=True, seed=i, detokenize=False, logprobs=0 if work.get("logprobs", True) else None
        )
        for i in range(len(prompts))
    ]

    def run() -> float:
        begun = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        took = time.perf_counter() - begun
        short = [len(d.outputs[0].token_ids) for d in done if len(d.outputs[0].token_ids) != new]
        if short:
            sys.exit(f"{len(short)} completions are not {new} tokens long, the first has {short[0]}")
        return took

    warm_up = [run(), run()]
    seconds = [run() for _ in range(work.get("repeats", 3))]
    median = statistics.median(seconds)
    total_in, total_out = sum(map(len, prompts)), new * len(prompts)
    print(json.dumps({
        "engine": f"vllm {vllm.__version__}", "start_s": start_s, "warm_up_s": warm_up, "seconds": seconds, "median_s": median,
        "prompt_tokens": total_in, "new_tokens": total_out, "tokens_per_s": (total_in + total_out) / median,
    }))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
