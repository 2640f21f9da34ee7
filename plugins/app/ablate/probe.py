"""Answers of a variant for `quality`: greedy outputs of fixed prompts, and log-likelihoods of fixed texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice
from typing import Any

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import FinishReason, SamplingParams, Workload
from dovetail.plugins.app.ablate.config import QualityConfig
from dovetail.plugins.app.bench.runs import Runs
from dovetail.plugins.app.bench.target import Target

Ids = list[int]


def plan(config: QualityConfig, target: Target, runs: Runs, name: str, workload: Workload) -> dict[str, Any] | None:
    """Return the prompts, which no run uses, and the windows of `config.text` if one is given; the same for all
    variants. None = no quality check."""
    if not config.prompts:
        return None
    length = min(config.prompt_tokens, target.max_len - config.tokens - 1)
    if length < 1:
        raise ConfigError(
            f"ablate.quality.tokens={config.tokens} leaves no room for a prompt in a context of {target.max_len}: "
            "lower it, or raise engine.max_len"
        )
    rate = workload.rates()[0]
    drawn = (request for number in count(1) for request in runs.requests(name, workload, -number, rate))
    # Use the ends of prompts: the beginnings may be a shared system prompt.
    prompts = [list(request.prompt_ids[-length:]) for request in islice(drawn, config.prompts)]
    return {"prompts": prompts, "tokens": config.tokens, "windows": _windows_of_text(config, target, length)}


def _windows_of_text(config: QualityConfig, target: Target, length: int) -> list[Any] | None:
    if config.text is None:
        return None
    try:
        with open(config.text, encoding="utf-8") as file:
            ids = list(target.encode(file.read()))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"ablate.quality.text={config.text}: cannot be read ({error})") from None
    size = length + config.tokens
    if len(ids) < size * config.prompts:
        raise ConfigError(
            f"ablate.quality.text={config.text}: {len(ids)} tokens are fewer than ablate.quality.prompts="
            f"{config.prompts} windows of {size} need"
        )
    return [[ids[i * size : (i + 1) * size], 1] for i in range(config.prompts)]


def probe(engine: Any, plan: dict[str, Any], seed: int) -> dict[str, Any]:
    """Answer the plan. `engine` is a started, idle Engine or ReplicatedEngine. If the plan has no windows yet, a window
    is a prompt followed by what this variant samples at temperature 1."""
    prompts, tokens, windows = plan["prompts"], plan["tokens"], plan["windows"]
    greedy = _complete(engine, prompts, [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)])
    if windows is None:
        drawn = [
            SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=seed + i)
            for i in range(len(prompts))
        ]
        sampled = _complete(engine, prompts, drawn)
        windows = [[prompt + out, len(prompt)] for prompt, (out, _) in zip(prompts, sampled, strict=True)]
    # Prompt log-probabilities come from one pass over the whole text (teacher forcing), without the prefix cache.
    reads = [SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)]
    read = _complete(engine, [ids for ids, _ in windows], reads)
    scored = [logprobs[start - 1 :] for (_, logprobs), (_, start) in zip(read, windows, strict=True)]
    return {
        "greedy": [out for out, _ in greedy],
        "windows": windows,
        "nll": [[round(-token.logprob, 6) for token in tokens] for tokens in scored],
        "top": [[token.top[0][0] for token in tokens] for tokens in scored],
    }


def _complete(engine: Any, prompts: Sequence[Ids], params: Sequence[SamplingParams]) -> list[tuple[Ids, list[Any]]]:
    """Return output and prompt log-probabilities of each prompt. `params` has one entry per prompt, or one for all."""
    engine.reset_cache()
    each = params if len(params) == len(prompts) else [params[0]] * len(prompts)
    found: dict[int, tuple[Ids, list[Any]]] = {}
    for ids, one in zip(prompts, each, strict=True):
        (seq,) = engine.add(ids, one)
        found[seq.uid] = ([], [])
    while engine.has_work:
        for event in engine.step():
            if event.reason is FinishReason.REJECTED:
                raise ConfigError(f"a prompt for ablate.quality was rejected: {event.detail}")
            out, logprobs = found[event.uid]
            out += event.tokens
            logprobs += event.prompt_logprobs
    return list(found.values())
