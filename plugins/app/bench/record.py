"""Provenance in result files: command, configuration, versions, machine and commit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

SCHEMA = "dovetail.bench/2"
"""Format version of the result file; changes when its readers have to change."""


def describe(composition: Composition, about: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the provenance record. `about` is a description of this machine, for a process that must not query the GPU
    itself, since that would occupy GPU memory."""
    return {
        "schema": SCHEMA,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "overrides": list(composition.overrides),
        "config": yaml.safe_load(composition.to_yaml()),
        "versions": versions(),
        "machine": about or machine(),
        "commit": commit(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("dovetail", "torch", "triton", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cuda": torch.version.cuda if gpus else None,
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def commit() -> dict[str, Any] | None:
    """Return the commit of the checkout that contains this code; None = an installed package."""
    # Git knows no path through the links of a checkout.
    here = Path(__file__).resolve()

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *words], cwd=here.parent, capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not git("ls-files", "--error-unmatch", str(here)) or (head := git("rev-parse", "HEAD")) is None:
        return None
    return {"hash": head, "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}
