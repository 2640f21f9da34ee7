"""Which layout serves a load: simulates it on each candidate, and finds the cheapest one that meets the objective."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dovetail.core.compose import compose
from dovetail.core.engine.checks import model_ranks
from dovetail.core.errors import ConfigError, DovetailError
from dovetail.core.interfaces import ModelSpec, Workload
from dovetail.plugins.app.ablate.variants import key_of, merged, word
from dovetail.plugins.app.bench.config import RunsConfig
from dovetail.plugins.app.bench.inprocess import EngineTarget
from dovetail.plugins.app.bench.metrics import at
from dovetail.plugins.app.bench.runs import Runs
from dovetail.plugins.app.bench.target import OnDone
from dovetail.plugins.app.plan.memory import HOST, Plan, make_plan
from dovetail.plugins.app.tables import console, number
from dovetail.plugins.app.waiting import bar, line_console

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.plugins.app.plan.config import PlanConfig

SIMULATED = ("executor=simulated", "executor.clock=virtual", "engine.device=cuda")
RUNS = RunsConfig(warmup=0)


def plan_load(composition: Composition, config: PlanConfig) -> dict[str, Any]:
    """Simulate every candidate. Returns the table and the overrides of the cheapest candidate that meets the objective.
    Raises ConfigError if the workload or a candidate that was given cannot be composed, or none can be simulated."""
    assert config.load is not None
    words = merged([text for text in composition.overrides if _is_kept(text)], [*_workload(config), *SIMULATED])

    def made(changes: Sequence[str]) -> Composition:
        return compose(
            merged(words, changes), app="bench", registry=composition.registry, config_dirs=composition.config_dirs
        )

    try:
        given = made([])
    except ConfigError as error:
        if "workload." not in str(error):
            raise
        raise ConfigError(
            f"plan.load={config.load}: {error} Here options of the workload are plan.options={{<name>: <value>}}"
        ) from None
    given.part("workload").build()
    layouts = [layout.split() for layout in config.layouts] or list(_grid(given, config))
    rows = []
    with bar(line_console(), "candidates", len(layouts), left=True) as update:
        for i, changes in enumerate(layouts):
            update(description=" ".join(changes), completed=i)
            rows.append(_row(changes, made, config))
    if all(row["reason"] for row in rows):
        raise ConfigError(f"plan.load={config.load}: no candidate can be simulated; the first, {_reasons(rows)}")
    good = [row for row in rows if row["meets"]]
    best = min(good, key=_order) if good else None
    return {
        "schema": "dovetail.plan_load/1",
        "load": config.load,
        "slo": {"ttft_p99_s": config.ttft, "tpot_p99_s": config.tpot},
        "gpus": config.gpus,
        "price_hour": config.price_hour,
        "candidates": rows,
        "best": _answer(best) if best else None,
    }


def _is_kept(text: str) -> bool:
    """Whether an override applies to simulated candidates."""
    key = key_of(text)
    if key in ("engine.record", "engine.record_tokens"):
        return False
    return key in ("executor.acceptance", "executor.speed") or key.split(".")[0] not in ("app", "plan", "executor")


def _workload(config: PlanConfig) -> list[str]:
    """Return the overrides of the workload."""
    assert config.load is not None
    path = Path(config.load).expanduser()
    recorded = path.is_file()
    options = config.options | ({"path": str(path)} if recorded else {})
    return [f"workload={'recording' if recorded else config.load}", *_overrides("workload", options)]


def _overrides(node: str, options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _overrides(f"{node}.{name}", value)
        else:
            yield f"{node}.{name}={json.dumps(value)}" if isinstance(value, list) else word(f"{node}.{name}", value)


def _grid(composition: Composition, config: PlanConfig) -> Iterator[list[str]]:
    """Yield quantizers x ranks x replicas, with the fewest GPUs first. Ranks and replicas are powers of two. Replicas
    of a model with routed experts are also lanes, which share them."""
    ranks = [tp for tp in model_ranks(composition, HOST, config.gpus) if tp & (tp - 1) == 0]
    powers = [1 << i for i in range(config.gpus.bit_length())]
    layouts = [(tp, dp) for tp in ranks for dp in powers if tp * dp <= config.gpus]
    moe, shared = _spec(composition).moe, list(_of_lanes(composition))
    experts = 0 if moe is None else moe.experts
    for tp, dp in sorted(layouts, key=lambda layout: (layout[0] * layout[1], layout[0])):
        for quant in dict.fromkeys((composition.choices["quant"], *config.quants)):
            layout = [f"quant={quant}", f"engine.tp={tp}", f"engine.dp={dp}"]
            yield layout
            if dp > 1 and experts and experts % (tp * dp) == 0:
                yield [*layout, f"engine.ep={tp * dp}", *shared]


def _spec(composition: Composition) -> ModelSpec:
    model = composition.part("model")
    spec: ModelSpec = model.facts() or model.target().spec(model.config)
    return spec


def _of_lanes(composition: Composition) -> Iterator[str]:
    """Yield what lanes need in place of what was chosen."""
    if composition.part("experts").target().rows != "own":
        yield "experts=gather"
    if composition.engine.late_launch:
        yield "engine.late_launch=false"
    if composition.engine.overlap_tokens:
        yield "engine.overlap_tokens=0"


def _row(changes: Sequence[str], made: Callable[[Sequence[str]], Composition], config: PlanConfig) -> dict[str, Any]:
    row: dict[str, Any] = {"overrides": " ".join(changes), "gpus": None, "tp": None, "reason": "", "meets": False}
    try:
        candidate = made(changes)
        row["gpus"] = candidate.engine.tp * candidate.engine.pp * candidate.engine.dp
        row["tp"] = candidate.engine.tp
        plan = make_plan(candidate)
        if plan.missing:
            row["reason"] = f"does not fit: {plan.misfit}"
            return row
        engine = candidate.engine.model_copy(update={"kv_pages": _pages(plan)})
        figures = _figures(replace(candidate, engine_config=engine))
    except DovetailError as error:
        if config.layouts and row["gpus"] is None:
            raise
        row["reason"] = " ".join(str(error).split())
        return row
    return row | figures | _judged(figures, row["gpus"], config)


def _pages(plan: Plan) -> int:
    """Return the pages of each KV group: engine.kv_pages, or else those that fit into the memory, at most those of all
    sequences."""
    engine = plan.engine
    if engine.kv_pages is not None:
        return engine.kv_pages
    most = engine.max_seqs * (-(-plan.max_len // engine.page_size) + 1)
    return max(min(int(plan.kv // plan.kv_bytes(engine.page_size)), most), 1)


def _figures(composition: Composition) -> dict[str, Any]:
    """Return the figures of the workload at its highest rate."""
    part, target = composition.part("workload"), EngineTarget(composition)
    workload: Workload = part.build()
    runs = Runs(RUNS, target, _no_bar, lambda line: None)
    rate = max((rate for rate in workload.rates() if rate is not None), default=None)
    with closing(target):
        target.start(lambda phase, share: None)
        (run,), _ = runs.measure(composition.choices["workload"], workload, rate)
    return {
        "rate": rate,
        "requests": run["requests"],
        "failed": run["failed"],
        "output_tokens_per_s": run["output_tokens_per_s"],
        "ttft_p99_s": _seconds(at(run, "ttft_ms.p99")),
        "tpot_p99_s": _seconds(at(run, "tpot_ms.p99")),
        "kv_used_max": run["kv_used_max"],
        "preemptions": run["preemptions"],
    }


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


@contextmanager
def _no_bar(title: str, requests: int) -> Iterator[OnDone]:
    yield lambda number: None


def _judged(figures: dict[str, Any], gpus: int, config: PlanConfig) -> dict[str, Any]:
    limits = ((figures["ttft_p99_s"], config.ttft), (figures["tpot_p99_s"], config.tpot))
    meets = not figures["failed"] and all(limit is None or value is None or value <= limit for value, limit in limits)
    price = None
    if config.price_hour is not None:
        price = gpus * config.price_hour / 3600 / figures["output_tokens_per_s"] * 1e6
    return {"meets": meets, "price_per_million": price}


def _order(row: dict[str, Any]) -> tuple[float, ...]:
    """Order candidates by price, to three digits. All that keep up with an offered rate produce equally many tokens, so
    their GPUs decide."""
    per_token = float(f"{row['gpus'] / row['output_tokens_per_s']:.3g}")
    return per_token if row["rate"] is None else row["gpus"], row["gpus"], per_token, row["ttft_p99_s"]


def _answer(row: dict[str, Any]) -> str:
    """Return the overrides with which an engine runs the candidate."""
    chosen: str = row["overrides"]
    return chosen if row["tp"] == 1 or "preset=" in chosen else f"{chosen} executor=multiproc"


def _reasons(rows: Sequence[dict[str, Any]]) -> str:
    return f"{rows[0]['overrides']}: {rows[0]['reason']}"


def show(result: dict[str, Any]) -> None:
    out = console(140, highlight=False)
    slo = [f"p99 {name} {limit:g} s" for name, limit in _limits(result) if limit is not None]
    title = f"{result['load']}, simulated; objective: {', '.join(slo) or 'none (plan.ttft, plan.tpot)'}"
    heads = ("GPUs", "output tokens/s", "TTFT p99, s", "TPOT p99, ms", "per million tokens", "objective")
    table = Table("candidate", *heads, title=title, title_justify="left")
    for row in result["candidates"]:
        gpus = "" if row["gpus"] is None else str(row["gpus"])
        if row["reason"]:
            table.add_row(row["overrides"], gpus, "", "", "", "", row["reason"])
            continue
        tpot = None if row["tpot_p99_s"] is None else row["tpot_p99_s"] * 1e3
        figures = (row["output_tokens_per_s"], row["ttft_p99_s"], tpot, row["price_per_million"])
        verdict = ("met" if slo else "none") if row["meets"] else "missed"
        table.add_row(row["overrides"], gpus, *map(number, figures), verdict)
    out.print(table)
    if result["best"] is None:
        out.print(f"no candidate meets the objective; plan.gpus={result['gpus']} limits their GPUs")
    else:
        what = "cheapest that meets the objective" if slo else "cheapest"
        out.print(f"{what}: {result['best']}", markup=False)


def _limits(result: dict[str, Any]) -> tuple[tuple[str, float | None], ...]:
    return ("TTFT", result["slo"]["ttft_p99_s"]), ("TPOT", result["slo"]["tpot_p99_s"])
