"""`python run.py app=plan`: whether a model fits, how many sequences, and how fast."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces.app import App
from dovetail.plugins.app.plan.config import PlanConfig
from dovetail.plugins.app.plan.memory import CONTEXT_BYTES, Plan, make_plan
from dovetail.plugins.app.plan.remedies import remedies
from dovetail.plugins.app.tables import console

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


OF_LOAD = ("options", "ttft", "tpot", "gpus", "quants", "layouts", "price_hour")
"""Options that have no effect without plan.load."""


def _refuse_without_load(config: PlanConfig) -> None:
    fields = PlanConfig.model_fields
    given = [name for name in OF_LOAD if getattr(config, name) != fields[name].get_default(call_default_factory=True)]
    if given:
        listed = " and ".join(f"plan.{name}" for name in given)
        raise ConfigError(f"{listed}: without effect unless plan.load names a workload or a recording, such as fixed")


class PlanApp(App):
    config: PlanConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        if self.config.load is not None:
            from dovetail.plugins.app.plan.load import plan_load, show

            found = plan_load(composition, self.config)
            print(json.dumps(found, indent=2)) if self.config.format == "json" else show(found)
            return 0 if found["best"] else 1
        _refuse_without_load(self.config)
        plan = make_plan(composition)
        facts = self._facts(composition, plan)
        if self.config.format == "json":
            print(json.dumps(facts, indent=2))
        else:
            _print(facts, plan.misfit)
        return 0

    def _facts(self, composition: Composition, plan: Plan) -> dict[str, Any]:
        spec, parameters, drafts = plan.spec, plan.spec.parameters, plan.drafter.spec
        fits = not plan.missing
        lengths = [n for n in self.config.lengths if n <= plan.max_len] or [plan.max_len]
        return {
            "model": spec.architecture,
            "parameters": parameters.total if parameters else None,
            "active_parameters": parameters.active if parameters else None,
            "gpus": plan.engine.tp * plan.engine.pp * plan.engine.dp,
            "layout": {"tp": plan.engine.tp, "pp": plan.engine.pp, "dp": plan.engine.dp},
            "formats": {"weights_bits": plan.formats.weight_bits, "kv_bytes": plan.formats.kv_bytes},
            "bytes_per_gpu": {
                "memory": plan.device_bytes,
                "usable": plan.budget,
                "weights": plan.weights,
                "adapters": plan.adapters,
                "drafter": plan.draft_weights,
                "activations": plan.activations,
                "context": CONTEXT_BYTES,
                "kv_cache": max(plan.kv, 0.0),
            },
            "kv_bytes_per_token": spec.kv_bytes_per_token(plan.formats.kv_bytes),
            "draft_kv_bytes_per_token": drafts.kv_bytes_per_token(plan.formats.kv_bytes) if drafts else 0,
            "kv_bytes_per_token_and_gpu": spec.kv_bytes_per_token(plan.formats.kv_bytes, plan.engine.tp),
            "spec_decode": composition.part("spec_decode").name,
            "experts": plan.experts.facts(self.config.batches, plan.engine.dp, plan.formats) if plan.experts else None,
            "max_len": plan.max_len,
            "sequences_of_max_len": plan.sequences(plan.max_len),
            "sequences": {str(n): plan.sequences(n) for n in lengths},
            "speed": [self._speed(plan, batch) for batch in self.config.batches] if fits else [],
            "ttft_s": {str(n): plan.cost.prefill_seconds(n) for n in (512, 8192) if n < plan.max_len} if fits else {},
            "fits": fits,
            "missing_bytes": plan.missing,
            "remedies": []
            if fits
            else [
                {"overrides": words, "sequences_of_max_len": better.sequences(better.max_len)}
                for words, better in remedies(composition, plan)
            ],
        }

    def _speed(self, plan: Plan, batch: int) -> dict[str, Any]:
        seconds = plan.decode_seconds(batch, self.config.context)
        return {
            "batch": batch,
            "context": self.config.context,
            "fits": batch <= plan.sequences(self.config.context),
            "tpot_ms": seconds * 1e3,
            "output_tokens_per_s": batch / seconds,
        }


def _print(facts: dict[str, Any], misfit: str) -> None:
    out = console(110)
    gib = 2**30
    sizes = facts["bytes_per_gpu"]
    total, active = facts["parameters"], facts["active_parameters"]
    count = f"{total / 1e9:.2f} B parameters" + (f", {active / 1e9:.2f} B active" if active != total else "")
    layout = " ".join(f"{name}={n}" for name, n in facts["layout"].items())
    out.print(f"[bold]{facts['model']}[/], {count}, on {facts['gpus']} devices ({layout})")

    memory = Table("per GPU", "GiB", title="memory", title_justify="left")
    for name in ("memory", "usable", "weights", "adapters", "drafter", "activations", "context", "kv_cache"):
        if name not in ("adapters", "drafter") or sizes[name]:
            memory.add_row(name.replace("_", " "), f"{sizes[name] / gib:.2f}")
    out.print(memory)
    per_token = facts["kv_bytes_per_token"]
    out.print(f"KV cache: {per_token} bytes per token, {facts['kv_bytes_per_token_and_gpu']} on each GPU")
    if own := facts["draft_kv_bytes_per_token"]:
        out.print(f"KV cache of the drafter: {own} bytes per token in addition")

    if (experts := facts["experts"]) is not None:
        cut = f", each cut in {experts['parts']}" if experts["parts"] > 1 else ""
        read = ", ".join(f"{number:g} for {batch}" for batch, number in experts["distinct"].items())
        out.print(
            f"experts={experts['placement']}: {experts['per_gpu']} experts of a layer on each GPU{cut}; a step of "
            f"n tokens reads at most about {read}"
        )
        if facts["layout"]["tp"] * experts["lanes"] > 1:
            out.print(f"exchange of layers with experts: {experts['exchange_bytes_per_token']} bytes per token and GPU")

    fit = Table("tokens", "sequences at once", title="how many fit", title_justify="left")
    for length, number in facts["sequences"].items():
        fit.add_row(length, str(number))
    out.print(fit)

    if facts["fits"]:
        speed = Table("running", "TPOT ms", "output tokens/s", title="predicted speed", title_justify="left")
        for row in facts["speed"]:
            mark = "" if row["fits"] else " (does not fit at once)"
            speed.add_row(f"{row['batch']}{mark}", f"{row['tpot_ms']:.2f}", f"{row['output_tokens_per_s']:.0f}")
        out.print(speed)
        if facts["spec_decode"] != "none":
            out.print(f"these are steps without drafts: what spec_decode={facts['spec_decode']} gains is not predicted")
        prefill = ", ".join(f"{n} tokens {s * 1e3:.1f} ms" for n, s in facts["ttft_s"].items())
        out.print(f"predicted prefill of one prompt: {prefill or 'none: max_len is shorter'}")
        out.print(
            f"[bold green]fits[/]: {facts['sequences_of_max_len']} sequences of {facts['max_len']} tokens at once"
        )
        return
    out.print(f"[bold red]does not fit[/]: {misfit}")
    for remedy in facts["remedies"]:
        number = remedy["sequences_of_max_len"]
        out.print(f"  fits with {remedy['overrides']} ({number} such sequence{'' if number == 1 else 's'})")
    if not facts["remedies"]:
        out.print("  nothing within 16 GPUs makes it fit")
