"""Perplexity of the bundled model on Python source, by the engine's own prompt log-probabilities."""

from __future__ import annotations

import argparse
import fractions
import heapq
import inspect
import json.decoder
import math
import statistics
import textwrap

from dovetail import LLM, SamplingParams

MODULES = (textwrap, json.decoder, argparse, fractions, statistics, heapq)
TEXTS = [inspect.getsource(module)[:3000] for module in MODULES]


def perplexity(*overrides: str) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM("tiny", overrides=overrides) as llm:
        said = [entry for g in llm.generate(TEXTS, params) for entry in g.prompt_logprobs]
    logprobs = [entry.logprob for entry in said]
    return math.exp(-sum(logprobs) / len(logprobs))
