"""vLLM's offline API, for compare.py. Runs under a Python that has vLLM and not Dovetail.

Settings: those of compare.py's `Shared`, and "engine_args", which override all other arguments of vllm.LLM. vLLM
chooses the tokens of a step itself: its default is larger than ours. Versions that cannot simulate the acceptance of
drafts verify them, and accept hardly any of those of random weights; "acceptance" in the description says which.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from protocol import Request, Requests, Run, serve


def engine_args(settings: dict[str, Any]) -> dict[str, Any]:
    args = {
        "model": settings["model"],
        "load_format": "dummy" if settings["dummy"] else "auto",
        "skip_tokenizer_init": not settings["grammars"],
        "dtype": settings["dtype"],
        "tensor_parallel_size": settings["tp"],
        "max_model_len": settings["max_len"],
        "max_num_seqs": settings["max_seqs"],
        "gpu_memory_utilization": settings["memory_fraction"],
        "enable_prefix_caching": settings["prefix_caching"],
        "disable_log_stats": True,
        "seed": 0,
    }
    if settings["drafting"] is not None:
        args["speculative_config"] = speculative_config(settings["drafting"], simulates_acceptance())
    return {**args, **settings["engine_args"]}


def speculative_config(drafting: dict[str, Any], simulates: bool) -> dict[str, Any]:
    """Return vLLM's options for the drafter that drafting.py describes."""
    found: dict[str, Any] = {"method": drafting["method"], "num_speculative_tokens": drafting["drafts"]}
    if "match" in drafting:
        found["prompt_lookup_min"], found["prompt_lookup_max"] = drafting["match"]
    found |= {name: drafting[name] for name in ("model", "quantization") if drafting.get(name) is not None}
    if simulates and drafting["rates"] is not None:
        found |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": drafting["rates"]}
    return found


def simulates_acceptance() -> bool:
    """Whether this version accepts drafts at given rates."""
    from dataclasses import fields

    from vllm.config import SpeculativeConfig

    return "synthetic_acceptance_rates" in {field.name for field in fields(SpeculativeConfig)}


@contextmanager
def load(settings: dict[str, Any]) -> Iterator[tuple[Run, dict[str, Any]]]:
    import vllm

    args = engine_args(settings)
    # vLLM writes its own objects into these options.
    llm = vllm.LLM(**deepcopy(args))

    def run(requests: Requests) -> dict[str, Any]:
        llm.reset_prefix_cache()  # as app=bench does between runs
        conversations = any(request.continues is not None for request in requests)
        began = time.perf_counter()
        tokens = (run_rounds if conversations else run_at_once)(llm, requests)
        return {"seconds": time.perf_counter() - began, "output_tokens": tokens}

    about = {"engine": f"vllm {vllm.__version__}", "engine_args": args}
    if (drafting := settings["drafting"]) is not None:
        simulated = "rejection_sample_method" in args["speculative_config"]
        about["acceptance"] = (
            "SIMULATED" if simulated else "of the drafts" if drafting["rates"] is None else "not simulated"
        )
    yield run, about


def sampling_params(request: Request, **more: Any) -> Any:
    from vllm import SamplingParams

    if request.json_schema is not None:
        from vllm.sampling_params import StructuredOutputsParams

        more["structured_outputs"] = StructuredOutputsParams(json=request.json_schema)
    return SamplingParams(
        **request.sampling, max_tokens=request.output_tokens, ignore_eos=True, detokenize=False, **more
    )


def run_at_once(llm: Any, requests: Requests) -> int:
    """Run independent requests. Returns the number of output tokens."""
    prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
    outputs = llm.generate(prompts, [sampling_params(request) for request in requests], use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def run_rounds(llm: Any, requests: Requests) -> int:
    """Run conversations: the loop of LLM.generate, which sends the next round when an answer is complete. Returns the
    number of output tokens."""
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    after: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        if request.continues is not None:
            after.setdefault(request.continues, []).append(index)

    def send(index: int, before: list[int]) -> None:
        prompts[index] = before + requests[index].prompt_ids
        params = sampling_params(requests[index], output_kind=RequestOutputKind.FINAL_ONLY)
        engine.add_request(str(index), {"prompt_token_ids": prompts[index]}, params)

    prompts: dict[int, list[int]] = {}
    tokens = 0
    for index, request in enumerate(requests):
        if request.continues is None:
            send(index, [])
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                index, answer = int(output.request_id), list(output.outputs[0].token_ids)
                tokens += len(answer)
                for following in after.get(index, ()):
                    send(following, prompts[index] + answer)
    return tokens


if __name__ == "__main__":
    serve(load)
