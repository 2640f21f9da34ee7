"""What a running engine can be asked beside requests: its state, and what is rare, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from dovetail.core.engine.engine import Engine
from dovetail.core.errors import RequestError
from dovetail.core.serving.protocol import Control, EngineStats, Reply


def engine_stats(engine: Engine) -> EngineStats:
    scheduler, kv, counters = engine.scheduler.stats(), engine.kv.stats(), engine.counters
    return EngineStats(
        running=scheduler.running,
        waiting=scheduler.waiting,
        preemptions=scheduler.preemptions,
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        output_tokens=counters.output_tokens,
        drafted=counters.drafted,
        accepted=counters.accepted,
        decode_rows=counters.decode_rows,
        pages=kv.pages,
        pages_owned=kv.owned,
        pages_cached=kv.cached,
        prefix_queries=counters.entered_tokens,
        prefix_hits=counters.cached_tokens,
        evictions=kv.evictions,
        tokens_owned=kv.owned_tokens,
        tokens_used=kv.used_tokens,
    )


def perform(engine: Engine, command: Control) -> Reply:
    """The value is a Future where it takes longer: `answer` with its result when it is done."""
    operation = _OPERATIONS.get(command.op)
    if operation is None:
        return Reply(command.id, error=f"no operation {command.op!r}; there are {', '.join(_OPERATIONS)}")
    return answer(command.id, lambda: operation(engine, **command.arguments))


def answer(id: int, call: Callable[[], Any]) -> Reply:
    """What it returns, or why it fails."""
    try:
        return Reply(id, call())
    except RequestError as error:
        return Reply(id, error=str(error), status=error.status)
    except Exception as error:
        return Reply(id, error=f"{type(error).__name__}: {error}")


def _check(engine: Engine) -> dict[str, Any]:
    engine.kv.check()
    return msgspec.to_builtins(msgspec.structs.asdict(engine_stats(engine)))


def _figures(engine: Engine) -> dict[str, Any]:
    return {"counters": dataclasses.asdict(engine.counters), "stats": msgspec.structs.asdict(engine_stats(engine))}


def _load_adapter(engine: Engine, name: str, folder: str) -> Future[None]:
    return engine.load_adapter(name, folder)


def _unload_adapter(engine: Engine, name: str) -> None:
    engine.unload_adapter(name)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "check": _check,
    "reset_cache": Engine.reset_cache,
    "figures": _figures,
    "load_adapter": _load_adapter,
    "unload_adapter": _unload_adapter,
}
