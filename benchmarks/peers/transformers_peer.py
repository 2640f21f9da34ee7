"""transformers' continuous batching, for compare.py.

Settings: those of compare.py's `Shared`, and "engine_args", which override everything in ContinuousBatchingConfig.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from protocol import Requests, Run, serve


@contextmanager
def load(settings: dict[str, Any]) -> Iterator[tuple[Run, dict[str, Any]]]:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    if settings["tp"] > 1:
        raise ValueError(f"tp={settings['tp']}: this peer runs on one device")
    device = "cuda" if torch.cuda.is_available() and settings["device"] != "cpu" else "cpu"
    dtype = getattr(torch, settings["dtype"]) if device == "cuda" else torch.float32
    torch.manual_seed(0)
    if settings["dummy"]:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(settings["model"]), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).to(device)
    page = 256 if device == "cuda" else 16
    args = {
        "page_size": page,
        "max_batch_tokens": settings["token_budget"],
        "max_requests_per_batch": settings["max_seqs"],
        "allow_block_sharing": settings["prefix_caching"],
    }
    if device == "cpu":
        args["num_blocks"] = settings["max_seqs"] * -(-settings["max_len"] // page)
    args.update(settings["engine_args"])
    # No token has id -1, so end-of-sequence is ignored.
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.eval().init_continuous_batching(
        generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**args)
    )
    with torch.no_grad():
        manager.warmup()
    manager.start()

    def run(requests: Requests) -> dict[str, Any]:
        for request in requests:
            if request.sampling != {"temperature": 0.0} or request.json_schema or request.continues is not None:
                raise ValueError("this peer runs greedy requests without a JSON Schema, which continue no other")
        began = time.perf_counter()
        for request in requests:
            manager.add_request(input_ids=request.prompt_ids, max_new_tokens=request.output_tokens)
        tokens = done = 0
        while done < len(requests):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the generation thread ended")
            elif result.error is not None:
                raise RuntimeError(f"a request failed: {result.error}")
            elif result.is_finished():
                done += 1
                tokens += len(result.generated_tokens)
        return {"seconds": time.perf_counter() - began, "output_tokens": tokens}

    yield run, {"engine": f"transformers {transformers.__version__}", "device": device, "engine_args": args}
    manager.stop(block=True, timeout=30)


if __name__ == "__main__":
    serve(load)
