"""Loads the installed packages in a process of its own, to name one that ends or blocks the process which imports it.

Errors of a package are caught where it is loaded; native code that crashes cannot be.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from dovetail.core.compose.discovery import SWITCH, discover
from dovetail.core.errors import PluginError

SECONDS = 60.0
"""Time limit for the imports of all packages."""


def check_packages() -> None:
    """Raise PluginError for a package that the process would not survive. Costs about a second."""
    with tempfile.TemporaryDirectory(prefix="dovetail-probe-") as place:
        log = Path(place) / "loading"
        command = [
            sys.executable,
            "-P",
            "-c",
            "import sys; from dovetail.core.compose.probe import load; load(sys.argv[1])",
        ]
        try:
            code = subprocess.run(
                [*command, str(log)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
                check=False,
            ).returncode
            how = (
                f"ends the process by {signal.Signals(-code).name}"
                if code < 0
                else f"ends the process with code {code}"
            )
        except subprocess.TimeoutExpired:
            how = f"has not ended after {SECONDS:g} s"
        # The file is missing, or its last line empty, if the process ended for another reason.
        loading = log.read_text(encoding="utf-8").split("\n")[-2:-1] if log.exists() else []
    if loading and loading[0]:
        package, name = loading[0].split("\t")
        raise PluginError(
            package, f"the import of its entry point {name} {how}; {SWITCH}=-{package.partition(' ')[0]} leaves it out"
        )


def load(log: str) -> None:
    """Load the packages; before each, append its name to a file, and an empty line at the end."""
    with open(log, "a", encoding="utf-8", buffering=1) as lines:
        discover(
            os.environ.get(SWITCH, ""), loading=lambda entry: print(entry.package, entry.name, sep="\t", file=lines)
        )
        print(file=lines)
