"""vLLM's offline API, for compare.py. Runs under a Python that has vLLM and not Dovetail.

Settings: those of compare.py's `Shared`, and "engine_args", which override all other arguments of vllm.LLM. vLLM
chooses the tokens of a step itself: its default is larger than ours.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from protocol import Requests, Run, serve


def engine_args(settings: dict[str, Any]) -> dict[str, Any]:
    args = {
        "model": settings["model"],
        "load_format": "dummy" if settings["dummy"] else "auto",
        "skip_tokenizer_init": True,
        "dtype": settings["dtype"],
        "tensor_parallel_size": settings["tp"],
        "max_model_len": settings["max_len"],
        "max_num_seqs": settings["max_seqs"],
        "gpu_memory_utilization": settings["memory_fraction"],
        "enable_prefix_caching": settings["prefix_caching"],
        "disable_log_stats": True,
        "seed": 0,
    }
    return {**args, **settings["engine_args"]}


@contextmanager
def load(settings: dict[str, Any]) -> Iterator[tuple[Run, dict[str, Any]]]:
    import vllm

    args = engine_args(settings)
    llm = vllm.LLM(**args)

    def run(requests: Requests) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [
            vllm.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
            for _, output in requests
        ]
        llm.reset_prefix_cache()  # as app=bench does between runs
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "output_tokens": sum(len(out.outputs[0].token_ids) for out in outputs)}

    yield run, {"engine": f"vllm {vllm.__version__}", "engine_args": args}


if __name__ == "__main__":
    serve(load)
