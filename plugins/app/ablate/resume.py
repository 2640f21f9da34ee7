"""Continues an ablation from its file of results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.core.errors import ConfigError
from dovetail.core.files import read_object

MAY_DIFFER = frozenset(("rounds", "out", "plot", "report", "resume"))
"""Options that change how many rounds there are, or where they are shown. Primary figure and gate are named before the
first start, so they may not."""


def read_earlier(path: str) -> dict[str, Any]:
    """Read the file of an earlier run. Raises ConfigError if it cannot be read."""
    try:
        return read_object(Path(path))
    except ConfigError as error:
        raise ConfigError(f"ablate.resume: {error}") from None


def restore(path: str, earlier: Mapping[str, Any], result: dict[str, Any], rounds: int) -> None:
    """Take the starts of an earlier run of the same ablation. Raises ConfigError if it was another one, or has more
    rounds than `rounds`."""
    if different := _differences(earlier, result):
        what = "; ".join(different)
        raise ConfigError(f"ablate.resume: {path} has another ablation, whose starts cannot be continued: {what}")
    stored = {record["name"]: record for record in earlier["variants"]}
    begun = max((start["round"] + 1 for record in stored.values() for start in record["starts"]), default=0)
    if begun > rounds:
        raise ConfigError(f"ablate.rounds={rounds}: {path} has starts of {begun} rounds, all of which count")
    for record in result["variants"]:
        # A failed variant is tried again.
        record["starts"] = stored[record["name"]]["starts"]
        record["quality"] = stored[record["name"]]["quality"]
    result["quality"] = earlier["quality"]
    result["when"] = earlier["when"]


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = [
        f"{name} {_short(earlier.get(name))}, now {_short(now[name])}"
        for name in ("schema", "workload", "rates", "design", "versions", "machine", "commit")
        if earlier.get(name) != now[name]
    ]
    before, after = _settings(earlier), _settings(now)
    changed = [name for name in after if before.get(name) != after[name]]
    found += [f"{name} {_short(before.get(name))}, now {_short(after[name])}" for name in changed]
    return found + _variants(earlier, now)


def _settings(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what determines the figures of a start."""
    try:
        options = {f"ablate.{k}": v for k, v in result["config"]["ablate"].items() if k not in MAY_DIFFER}
    except (KeyError, TypeError, AttributeError):
        return {}
    return options


def _variants(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return how the variants differ: their names, what was skipped, and the words that compose them."""
    try:
        before, after = (
            {one["name"]: (one["overrides"], one["skipped"]) for one in r["variants"]} for r in (earlier, now)
        )
    except (KeyError, TypeError):
        return ["it has no variants"]
    found = [f"variant {name}, now gone" for name in before if name not in after]
    found += [f"variant {name} is new" for name in after if name not in before]
    for name in (name for name in before if name in after):
        (words, skipped), (new_words, newly_skipped) = before[name], after[name]
        if words != new_words:
            gone = [word for word in words if word not in new_words]
            new = [word for word in new_words if word not in words]
            # The same words for all variants come from the command line.
            found.append(f"{' '.join(gone) or 'nothing'}, now {' '.join(new) or 'nothing'}")
        if skipped != newly_skipped:
            found.append(f"{name} skipped: {_short(skipped)}, now {_short(newly_skipped)}")
    return list(dict.fromkeys(found))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
