"""`python run.py app=quality`: what number formats cost in quality, on held-out text."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import CapabilityError, CapacityError, ConfigError, DovetailError
from dovetail.core.interfaces import App
from dovetail.plugins.app.ablate.variants import Owner, Variant, combinations, listed, one_error
from dovetail.plugins.app.ablate.worker import computes
from dovetail.plugins.app.bench.app import check_writable
from dovetail.plugins.app.bench.inprocess import EngineTarget
from dovetail.plugins.app.bench.record import describe
from dovetail.plugins.app.bench.report import check_plot
from dovetail.plugins.app.quality.config import QualityConfig
from dovetail.plugins.app.quality.report import draw, show
from dovetail.plugins.app.quality.text import Ids, documents, windows
from dovetail.plugins.app.waiting import bar, in_words, line_console, phases_in_lines

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.plugins.app.quality.measure import Answers

SCHEMA = "dovetail.quality/1"
"""Format version of the result file; changes when its readers have to change."""

QUALITY = Owner(
    name="quality",
    composes="quality",
    fixed={
        "app": "each variant is measured as app=quality does",
        "quality": "the options of this app hold for all variants",
    },
)


class QualityApp(App):
    config: QualityConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        self.console = line_console()
        self._check_files()
        variants = make_variants(self.config, composition)
        texts = documents(self.config)
        read = self._windows(variants, texts)
        records = [_record(variant, _unfit(variant)) for variant in variants]
        if records[0]["skipped"]:
            raise CapabilityError([f"{records[0]['name']}, the reference: {records[0]['skipped']}"])
        result = describe(composition) | {
            "schema": SCHEMA,
            "text": {"name": self.config.text or "stdlib", "sha256": _hash(texts)},
            "interrupted": True,
            "variants": records,
        }
        try:
            self._measure(variants, records, read, result)
            result["interrupted"] = False
        finally:
            # Save and show what was measured, also after Ctrl-C.
            if any(record["figures"] or record["failure"] for record in records):
                self._keep(result)
                show(result)
                if self.config.out is not None:
                    draw(str(self._plot), result)
        return 1 if any(record["failure"] for record in records) else 0

    # Before anything is loaded.

    @property
    def _json(self) -> Path:
        return Path(self.config.out or "") / "quality.json"

    @property
    def _plot(self) -> Path:
        return Path(self.config.out or "") / "quality.svg"

    def _check_files(self) -> None:
        if self.config.out is not None:
            check_plot(str(self._plot), "quality.out")
            check_writable(str(self._json), "quality.out")

    def _windows(self, variants: Sequence[Variant], texts: Sequence[str]) -> list[Ids]:
        """Return the windows, in the reference's token ids. They must be the same tokens for every variant."""
        from dovetail.core.worker.dtypes import resolve_device, resolve_dtype
        from dovetail.plugins.app.quality.rows import check_bytes

        first = EngineTarget(variants[0].composition)
        found = windows(self.config, texts, first.tokenizer)
        if (longest := len(found[0]) + 1) > first.max_len:
            raise ConfigError(
                f"quality.length={self.config.length}: windows need a context of {longest} tokens, and it has "
                f"{first.max_len}: lower it, or raise engine.max_len"
            )
        model, engine = variants[0].composition.part("model"), variants[0].composition.engine
        spec = model.facts() or model.target().spec(model.config)
        dtype = resolve_dtype(engine.dtype, spec.dtype, resolve_device(engine.device, 0, engine.first_gpu))
        check_bytes(len(found), len(found[0]) - 1, first.vocab, dtype.itemsize, self.config.reference_bytes)
        for one in variants[1:]:
            if one.composition.part("model").to_node() == model.to_node():
                continue
            other = EngineTarget(one.composition)
            if other.vocab != first.vocab:
                raise ConfigError(
                    f"{one.name}: its model has {other.vocab} tokens, the reference's {first.vocab}: their "
                    "distributions cannot be compared"
                )
            if windows(self.config, texts, other.tokenizer) == found:
                continue
            if other.tokenizer.ids() != first.tokenizer.ids():
                raise ConfigError(f"{one.name}: its tokenizer has other tokens than the reference's")
            # GGUF files, for instance, state how a text is split by a name alone.
            self.console.print(
                f"{one.name} splits the text otherwise; it is measured on the reference's tokens", markup=False
            )
        return found

    # Measurement.

    def _measure(
        self, variants: Sequence[Variant], records: list[dict[str, Any]], read: list[Ids], result: dict[str, Any]
    ) -> None:
        """Run every variant once, the reference first; without it, nothing can be compared."""
        reference: Answers | None = None
        running = [i for i, record in enumerate(records) if not record["skipped"]]
        with bar(self.console, "", len(running), left=True) as update:
            for done, i in enumerate(running):
                answers = self._answers(variants[i], records[i], read, reference, done, update)
                if answers is None and reference is None:
                    return
                reference = reference or answers
                self._keep(result)

    def _answers(
        self,
        variant: Variant,
        record: dict[str, Any],
        read: list[Ids],
        reference: Answers | None,
        done: int,
        update: Any,
    ) -> Answers | None:
        """Measure one variant and fill its record; None = it failed."""
        from dovetail.plugins.app.quality.compare import answers_record, figures
        from dovetail.plugins.app.quality.measure import measure

        config, began = self.config, time.monotonic()
        update(description=record["name"], completed=done)
        with phases_in_lines(self.console, record["name"]) as progress:

            def phase(name: str, share: float | None) -> None:
                progress(name, share)
                update(description=f"{record['name']}: {in_words(name, share)}")

            try:
                rows = None if reference is None else reference.rows
                answers = measure(variant.composition, read, config.tokens, rows, config.reference_bytes, phase)
            except DovetailError as error:
                record["failure"] = str(error)
                answers = None
        if answers is not None:
            record |= {"startup": answers.startup, "answers": answers_record(answers)}
            record["figures"] = figures(answers, reference)
        if not self.console.is_terminal:
            how = "done" if answers is not None else "failed"
            self.console.print(f"{record['name']}: {how} in {time.monotonic() - began:.1f} s", markup=False)
        return answers

    def _keep(self, result: dict[str, Any]) -> None:
        if self.config.out is not None:
            self._json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def make_variants(config: QualityConfig, composition: Composition) -> list[Variant]:
    """Compose the reference, which is the first, and every variant. Raises one ConfigError with all mistakes."""
    if config.variants:
        found = listed(QUALITY, config.variants, composition)
    elif config.vary:
        found = combinations(QUALITY, config.vary, composition)
    else:
        raise ConfigError(
            "app=quality needs something to compare with the given composition: "
            "'quality.vary={quant:[none,int8,fp8],engine.kv_dtype:[auto,fp8_e4m3]}' tries every combination, "
            "'quality.variants=[\"quant=fp8 quant.scales=tensor\"]' tries lines of overrides"
        )
    if mistakes := [f"{one.name}: {reason}" for one in found for reason in _unreadable(one.composition)]:
        raise one_error(mistakes)
    return found


def _unreadable(composition: Composition) -> list[str]:
    """Return why the logits of a composition cannot be read, if so."""
    found = []
    if composition.engine.dp > 1:
        found.append(f"engine.dp={composition.engine.dp}: the logits of one replica are read: set engine.dp=1")
    if not computes(composition):
        found.append(f"executor={composition.choices['executor']} computes no logits: choose one that runs the model")
    return found


def _unfit(variant: Variant) -> str | None:
    """Return why this host cannot run a variant, or None."""
    from dovetail.core.engine.checks import check_fit

    try:
        check_fit(variant.composition)
    except CapabilityError as error:
        return "; ".join(error.conflicts)
    except CapacityError as error:
        return str(error)
    return None


def _record(variant: Variant, skipped: str | None) -> dict[str, Any]:
    return {
        "name": variant.name,
        "changes": list(variant.changes),
        "overrides": list(variant.composition.overrides),
        "skipped": skipped,
        "failure": None,
        "startup": None,
        "answers": None,
        "figures": None,
    }


def _hash(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()[:16]
