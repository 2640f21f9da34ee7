"""The command line. A user's mistake gives one message and exit code 2, never a traceback."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import NoReturn, TextIO

from dovetail.core.compose.composer import compose
from dovetail.core.compose.discovery import installed, not_installed
from dovetail.core.compose.kinds import KINDS, PRESET
from dovetail.core.compose.probe import check_packages
from dovetail.core.compose.registry import Package
from dovetail.core.compose.sources import Repository, hydra_1_3, open_sources
from dovetail.core.compose.wording import listing, program
from dovetail.core.errors import ConfigError, DovetailDeprecationWarning, DovetailError, PluginError, one_line

DEBUG = "DOVETAIL_DEBUG"
_SIGPIPE, _SIGTERM = 141, 143
"""Exit codes that a shell reports for a program ended by these signals."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers of jobs send: the run ends as after Ctrl-C, with what it has saved and shown."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        with _sigterm():
            code = _run(sys.argv[1:] if argv is None else list(argv))
            sys.stdout.flush()  # flush here, where a closed pipe can be distinguished from a bug
        return code
    except DovetailError as error:
        return _fail(error)
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return _SIGPIPE
    except SystemExit as error:
        # Rich, which prints tables, has already replaced stdout by /dev/null.
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return _SIGPIPE
    except _Terminated:
        return _SIGTERM
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if (package := _package_at_fault(error)) is None:
            raise  # a bug of ours keeps its traceback
        found = PluginError(str(package), f"{type(error).__name__}: {one_line(str(error))}")
        found.__cause__ = error
        return _fail(found)


def _fail(error: DovetailError) -> int:
    """Print the message, and return the exit code."""
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    hidden = isinstance(error.__cause__, Exception) and not os.environ.get(DEBUG)
    print(f"dovetail: {error}" + (f" ({DEBUG}=1 shows the traceback)" if hidden else ""), file=sys.stderr)
    return 2


def _package_at_fault(error: Exception) -> Package | None:
    """Return the package in whose code an error was raised, such as that of a checkpoint reader; None = it was in ours.
    Frames of libraries do not count."""
    registry = installed()
    referred = [(found.package, found.component.target) for found in registry.registered.values()]
    homes: dict[str, Package | None] = {
        reference.partition(".")[0]: package for package, reference in (*referred, *registry.checkpoint_readers)
    }
    # A package may register one of our classes, and our code does not become its own by that.
    homes[__name__.partition(".")[0]] = None
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours_or_theirs = [homes[home] for name in names if (home := name.partition(".")[0]) in homes]
    return ours_or_theirs[-1] if ours_or_theirs else None


@contextmanager
def _sigterm() -> Iterator[None]:
    """Raise _Terminated on the first SIGTERM. Further ones have no effect: `timeout` sends two."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, lambda *_: None)
        raise _Terminated

    # Only the main thread may set handlers, and one that is not the default belongs to another program.
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _reader_is_gone() -> bool:
    """Whether stdout is a broken pipe, as under `| head`. If so, redirect it: Python flushes it again at exit."""
    try:
        out = sys.stdout.fileno()
    except OSError:
        return False  # a caller replaced it
    poll = select.poll()
    poll.register(out, select.POLLOUT)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return gone


def _run(argv: list[str]) -> int:
    # Words after `--` are text for the app. They may contain quotes, commas and equals signs, so Hydra never sees
    # them.
    cut = argv.index("--") if "--" in argv else len(argv)
    words, prompts = argv[:cut], argv[cut + 1 :]
    args = _parser().parse_intermixed_args(words)
    if args.help:
        print(_help(tuple(args.config_dir)))
        return 0
    if args.version:
        try:
            print(f"dovetail {version('dovetail')}")
        except PackageNotFoundError:
            raise ConfigError(not_installed()) from None
        return 0
    if args.multirun:
        raise ConfigError(
            "-m would run a sweep in one process, where one engine's memory, kernels and caches affect the next: "
            "app=ablate 'ablate.vary={kv_cache:[paged,radix]}' runs each alternative in a separate process"
        )
    if "app=check" in args.overrides:
        check_packages()  # the package that is checked may be one that this process would not survive
    with warnings.catch_warnings():
        warnings.showwarning = _one_line
        composition = compose(args.overrides, config_dirs=args.config_dir)
    if prompts and not composition.takes_prompts:
        raise ConfigError(f"app={composition.app} takes no prompts, and {len(prompts)} words follow `--`")
    if args.cfg:
        print(composition.to_yaml(), end="")
        return 0
    return composition.run(prompts)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{program()} --help` lists the options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dovetail", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job",))
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-cd", "--config-dir", action="append", default=[])
    return parser


def _one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    where = "" if issubclass(category, DovetailDeprecationWarning) else f"{filename}:{lineno}: "
    print(f"dovetail: {where}{message}", file=file or sys.stderr)


def _help(folders: tuple[str, ...]) -> str:
    with hydra_1_3():
        registry, sources = open_sources(installed(), folders)
        repository = Repository(sources, registry)
        rows = [(kind, repository.get_group_options(kind)) for kind in (*KINDS, PRESET)]
    chosen = "\n".join(f"  {kind:17} {listing(options)}" for kind, options in rows if options)
    return f"""\
usage: {program()} [<kind>=<name> | <kind>.<option>=<value> | engine.<setting>=<value> | +preset=<name>]...
       {" " * len(program())} [-- <prompt>...]

{chosen}

  --cfg job         print the composed config and stop
  --config-dir DIR  read your own presets and variants from this folder
  app=plugins       list every component with its options, package and version

  --version         print the package version

{program()} -- "Once upon a time"
{program()} scheduler=static engine.max_seqs=8"""
