"""The kinds of component. A kind is a config group, a folder in plugins/ and a page in the docs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PRESET = "preset"
"""Config group of presets. It is not a kind: a preset holds choices and has no component."""

Cardinality = Literal["one", "many", "per_request"]


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    cardinality: Cardinality
    """one: exactly one component is selected; many: an ordered list; per_request: each request picks among all."""
    api: str
    """Version of the contract, "<kind>/<major>.<minor>". A component's `api` is compared with it."""
    interface: str
    """Reference to the contract's class, "module:Class". A component's target must be a subclass of it."""
    suite: str
    """Reference to the suite of tests of the contract, "module:Class". It needs the `test` extra."""
    about: str


def _kind(name: str, cardinality: Cardinality, interface: str, suite: str, about: str, api: str = "0.1") -> Kind:
    tests = f"dovetail.core.testing.{suite}"
    return Kind(name, cardinality, f"{name}/{api}", f"dovetail.core.interfaces:{interface}", tests, about)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        _kind("app", "one", "App", "app:AppContract", "what a run does: generate text, serve, measure, compare"),
        _kind("model", "one", "Model", "model:ModelContract", "layers, weight names and the forward pass", api="0.4"),
        _kind(
            "scheduler",
            "one",
            "Scheduler",
            "scheduler:SchedulerContract",
            "which sequences run in a step, and how many tokens of each",
            api="0.3",
        ),
        _kind(
            "kv_cache",
            "one",
            "KVAllocator",
            "kv_cache:KVAllocatorContract",
            "which sequence owns which KV page, and what is reused",
        ),
        _kind(
            "attention",
            "one",
            "AttentionBackend",
            "attention:AttentionContract",
            "writes keys and values to pages and attends over them",
            api="0.4",
        ),
        _kind(
            "quant",
            "one",
            "Quantizer",
            "quant:QuantizerContract",
            "the number format of weights, activations and KV",
            api="0.3",
        ),
        _kind(
            "adapter",
            "one",
            "Adapters",
            "adapter:AdaptersContract",
            "changes to linear layers that requests choose by name",
        ),
        _kind(
            "spec_decode",
            "one",
            "Drafter",
            "spec_decode:DrafterContract",
            "proposes tokens that the model then verifies",
            api="0.8",
        ),
        _kind("executor", "one", "Executor", "executor:ExecutorContract", "runs plans on one or many ranks", api="0.2"),
        _kind("router", "one", "Router", "router:RouterContract", "which data-parallel replica runs a request"),
        _kind(
            "collective",
            "one",
            "Collective",
            "collective:CollectiveContract",
            "sums and gathers between ranks",
            api="0.3",
        ),
        _kind(
            "experts",
            "one",
            "ExpertPlacement",
            "experts:ExpertsContract",
            "which rank has which routed experts, and how rows get there",
        ),
        _kind("cost", "one", "CostModel", "cost:CostContract", "predicts the time of a plan", api="0.2"),
        _kind(
            "logits",
            "many",
            "LogitsProcessor",
            "logits:LogitsProcessorContract",
            "changes logits before a token is sampled",
            api="0.2",
        ),
        _kind(
            "grammar",
            "one",
            "GrammarCompiler",
            "grammar:GrammarContract",
            "which tokens may come next, for outputs of a given form",
            api="0.3",
        ),
        _kind(
            "observer",
            "many",
            "Observer",
            "observer:ObserverContract",
            "receives one record per step, off the critical path",
        ),
        _kind(
            "tool_parser",
            "per_request",
            "ToolParser",
            "parsers:ToolParserContract",
            "finds tool calls in generated text",
        ),
        _kind(
            "reasoning_parser",
            "per_request",
            "ReasoningParser",
            "parsers:ReasoningParserContract",
            "separates reasoning from the answer",
        ),
        _kind("workload", "one", "Workload", "workload:WorkloadContract", "the requests of a benchmark"),
    )
}

_NOT_OF_ENGINES = ("app", "tool_parser", "reasoning_parser", "workload")
ENGINE_NODES = ("engine", *(kind for kind in KINDS if kind not in _NOT_OF_ENGINES))
"""The nodes of an app that runs an engine."""
