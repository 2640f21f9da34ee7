"""Starts Python processes without fork or pickle; each composes its configuration from overrides sent to it."""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from dovetail.core.compose import KINDS, Package, compose, discover
from dovetail.core.compose.composition import Lane, selected_in
from dovetail.core.compose.registry import Source
from dovetail.core.errors import ConfigError
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.failure import for_user, traceback_of
from dovetail.core.parallel.lanes import LOST

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

SHOW_STACKS = signal.SIGUSR1
"""Signal that makes such a process write the stacks of all its threads to stderr."""
LAST_LOOK_SECONDS = 1.0
"""Time for a hung process to write its stacks before it is killed."""
_PR_SET_PDEATHSIG = 1
_BOOT = """
import json, pkgutil, sys
sys.path[:] = json.loads(sys.argv[1])
pkgutil.resolve_name(sys.argv[2])(int(sys.argv[3]), int(sys.argv[4]))
"""


def start_process(
    entry: str,
    inherited: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    output: int | None = None,
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Run `entry` ("module:function") in a new process as function(descriptor of its end of the channel, pid of this
    process). `output`: descriptor for its and its children's stdout and stderr; None = this process's. Linux ends the
    process together with the *thread* that calls this (see `enter`)."""
    ours, theirs = socket.socketpair()
    path = json.dumps([os.path.abspath(folder) for folder in sys.path])
    with theirs:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, path, entry, str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(), *inherited),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            # Ctrl-C in a terminal then reaches only the starting process, which ends the others in order.
            process_group=0,
        )
    return popen, Channel(ours)


def end_hung(popen: subprocess.Popen[bytes]) -> None:
    """Make a hung process write its stacks, then kill it. Returns at once; callable from any thread."""
    popen.send_signal(SHOW_STACKS)
    last_look = threading.Timer(LAST_LOOK_SECONDS, popen.kill)
    last_look.daemon = True
    last_look.start()


def enter(control_fd: int, parent: int, *ignored: signal.Signals) -> Channel:
    """Set up the started process and return its end of the channel. Call it first in the entry function. The parent
    handles the `ignored` signals and ends this process in order."""
    die_with(parent)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS, all_threads=True)
    return Channel(socket.socket(fileno=control_fd))


def die_with(parent: int) -> None:
    """Let Linux end this process with its parent, even in a collective. Elsewhere the closed socket shows that end."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def report(control: Channel, error: BaseException, composition: Composition | None = None) -> None:
    """Send a fatal error to the parent, or print it to stderr if the channel is closed. With a composition the message
    names the component that failed."""
    shown, trace = for_user(error, composition), traceback_of(error)
    message = {"op": "error", "at": time.monotonic(), "text": str(shown), "type": type(shown).__name__}
    try:
        control.send(message | {"traceback": trace})
    except ChannelClosed:
        # A lane that lost another one is not the cause, which the parent has reported.
        text = str(shown)
        print(text if LOST in text else trace or text, file=sys.stderr, flush=True)


def identity(composition: Composition) -> dict[str, Any]:
    """Return what must be equal on every rank before anything is loaded: the versions of the components' packages, and
    digests of the components and of their options. Components that each request picks may differ."""
    fixed = {kind: part for kind, part in composition.parts.items() if KINDS[kind].cardinality != "per_request"}
    parts = sorted(
        (part.component.kind, part.name, part.component.api, part.package)
        for part in selected_in((composition.app_part, fixed))
    )
    nodes = {name: node for name, node in composition.nodes().items() if name in fixed or name not in KINDS}
    return {
        "packages": {package.name: package.version for _, _, _, package in parts},
        "components": _digest([[*one, str(package)] for *one, package in parts]),
        "config": _digest(nodes),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def order_for(composition: Composition) -> dict[str, Any]:
    """Return the message from which another process of this machine recreates the composition (`recompose`), even if
    plugins have been installed or removed since."""
    return {
        "overrides": list(composition.overrides),
        "config_dirs": list(composition.config_dirs),
        "sources": [
            [source.package.name, source.package.version, source.name, source.value]
            for source in composition.registry.sources
        ],
        "identity": identity(composition),
        "lane": None if (lane := composition.lane) is None else [lane.number, lane.count, lane.address],
    }


def recompose(order: Mapping[str, Any]) -> Composition:
    wanted: dict[str, Any] = order["identity"]
    _check_packages(wanted["packages"])
    sources = [Source(Package(name, version), *entry) for name, version, *entry in order["sources"]]
    registry = discover(sources=sources) if sources else None
    composition = compose(order["overrides"], registry=registry, config_dirs=order["config_dirs"])
    found = identity(composition)
    if found["components"] != wanted["components"]:
        raise ConfigError(
            f"the ranks see different components ({found['components']} here, {wanted['components']} on rank 0): "
            "install the same versions of the same packages for every rank, and give no registry by hand"
        )
    if found["config"] != wanted["config"]:
        raise ConfigError(
            f"composing {' '.join(order['overrides'])} again gave options that differ from rank 0's: it reads configs "
            "that only rank 0 can find"
        )
    return composition if order["lane"] is None else replace(composition, lane=Lane(*order["lane"]))


def _check_packages(wanted: Mapping[str, str]) -> None:
    """Raise ConfigError if the package of a component has been removed or replaced since rank 0 composed."""
    for name, version in wanted.items():
        try:
            found = metadata.version(name) if version else ""
        except metadata.PackageNotFoundError:
            raise ConfigError(
                f"package {name} {version} is in use, and it is not installed any more: install it again"
            ) from None
        if found != version:
            raise ConfigError(
                f"package {name} was version {version} at the start of this run and is {found} now: install {version} "
                "again, or start the run again"
            )
