"""EngineClient: an engine in a process of its own, for asyncio. Requests go in, text comes out; a death is told."""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import zmq

from dovetail.core.engine.output import Delta, StopWatch, Timing
from dovetail.core.errors import DovetailError, RequestError
from dovetail.core.interfaces import SamplingParams, TokenLogprobs
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.failure import describe_exit
from dovetail.core.parallel.process import start_process
from dovetail.core.parallel.worker import identity
from dovetail.core.serving.protocol import (
    Abort,
    Add,
    Batch,
    Control,
    EngineInfo,
    EngineStats,
    Finish,
    LogprobWire,
    News,
    Output,
    Reply,
)
from dovetail.core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "failed", "stopped"]
_STOP_SECONDS = 10.0
_HOUR = 3600.0


class EngineDown(DovetailError):
    """There is no engine to run a request, or it died while the request ran. The next attempt may succeed."""


class Stream:
    """One request's output. Deltas that nobody took yet gather, and one `take` brings them all."""

    def __init__(self, id: int, watches: list[StopWatch], loop: asyncio.AbstractEventLoop) -> None:
        self.id = id
        self.timing = Timing(time.perf_counter())
        self.cached = 0
        """Prompt tokens found in the prefix cache. Written by the output thread."""
        self.watches = watches
        """Read and written by the output thread."""
        self.open = set(range(len(watches)))
        """Samples that still run. Written by the output thread."""
        self.ended = False
        """Everything came, or it failed, or it was aborted. Written by the event loop."""
        self.latest: dict[int, float] = {}
        """Sample -> time.perf_counter() when it got tokens last. Written by the event loop."""
        self._loop = loop
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Delta]:
        """What came since the last call; waits for something. Empty: complete. Raises RequestError, EngineDown."""
        while not self._deltas and self._error is None and not self.ended:
            self._waiter = self._loop.create_future()
            await self._waiter
        deltas, self._deltas = self._deltas, []
        if not deltas and self._error is not None:
            raise self._error
        return deltas

    # For the client, in the event loop.

    def put(self, delta: Delta, last: bool) -> None:
        now = time.perf_counter()
        if delta.token_ids and not self.timing.first_token:
            self.timing.first_token = now
        self._deltas.append(delta)
        if last:
            self.timing.finished = now
            self.ended = True
        self._wake()

    def fail(self, error: Exception) -> None:
        self.ended = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Belongs to one event loop; every method is called there."""

    def __init__(
        self,
        composition: Composition,
        *,
        max_restarts: int = 0,
        on_stats: Callable[[EngineStats], None] = lambda stats: None,
        on_more: Callable[[float, int], None] = lambda seconds, tokens: None,
    ) -> None:
        """`max_restarts`: how often within an hour a dead engine is replaced; then the state is "failed".
        `on_stats` is called a few times a second while the engine works, `on_more` when a sample, not for the first
        time, gets tokens: seconds since those before, and how many."""
        self.composition = composition
        self.max_restarts, self._on_stats, self._on_more = max_restarts, on_stats, on_more
        self.state: State = "stopped"
        self.failure = ""
        """Why the engine died last."""
        self.phase = ""
        """What a starting engine is doing."""
        self.stats = EngineStats()
        self.samples = 0
        """Samples that run or wait, over all requests."""
        self.failed = asyncio.Event()
        """Set when the engine is gone for good."""
        self.down = asyncio.Event()
        """Set while there is no engine that is ready."""
        self.down.set()
        self._ready = asyncio.Event()
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._ids = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._deaths: deque[float] = deque()
        self._process: _EngineProcess | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDown(f"the engine is starting{f' ({self.phase})' if self.phase else ''}")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """Thread-safe."""
        if self._tokenizer is None:
            raise RequestError(f"the model {self.info.model} has no tokenizer: give token ids, and no stop strings")
        return self._tokenizer

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Returns at once; `wait_ready` waits for the engine."""
        self._loop = asyncio.get_running_loop()
        self._launch()

    async def wait_ready(self) -> EngineInfo:
        """Raises EngineDown when the engine is gone for good."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._ready, self.failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.state == "failed":
            raise EngineDown(self.failure)
        return self.info

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        user: str = "",
        cache_salt: str = "",
        hints: Mapping[str, float] | None = None,
        keep: Collection[str] = (),
    ) -> Stream:
        """keep: special tokens whose text is part of the output.

        deadline: seconds from now, which schedulers may read. A refusal comes out of the stream as RequestError."""
        if self.state != "ready" or self._process is None:
            raise EngineDown(f"the engine is {self.state}{f': {self.failure}' if self.failure else ''}")
        tokenizer = self.tokenizer if params.stop else self._tokenizer
        id = next(self._ids)
        stream = Stream(id, [StopWatch(params, tokenizer, keep) for _ in range(params.n)], self._loop)
        chosen = params.model_dump(exclude_unset=True)
        add = Add(id, list(prompt_ids), chosen, priority, deadline, user, cache_salt, dict(hints or {}))
        try:
            message = self._encoder.encode(add)
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            # Numbers past 64 bits, half of a surrogate pair, a nest too deep: JSON has them, a message has not.
            raise RequestError(f"a value cannot be sent to the engine: {error}") from None
        self._streams[id] = stream
        self.samples += params.n
        self._process.send(message)
        return stream

    def abort(self, stream: Stream) -> None:
        """Idempotent; a complete stream is left alone."""
        if self._forget(stream) and self._process is not None:
            self._process.send(self._encoder.encode(Abort(stream.id)))

    async def control(self, op: str, **arguments: Any) -> Any:
        """`check`: the allocator's own integrity check, then the counters. `reset_cache`: forget cached prefixes."""
        if self._process is None or self.state != "ready":
            raise EngineDown(f"the engine is {self.state}")
        id = next(self._ids)
        message = self._encoder.encode(Control(id, op, arguments))
        answer = self._replies[id] = self._loop.create_future()
        self._process.send(message)
        return await answer

    async def close(self) -> None:
        """Abort what runs and end the engine's process. Idempotent."""
        if self.state != "failed":
            self.state = "stopped"
        self._fail_all(EngineDown("the server stops"))
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.stop)

    # From the engine's process, in the event loop.

    def _launch(self) -> None:
        self.state = "starting"
        self._process = _EngineProcess(self)
        self._process.thread.start()

    def on_ready(self, process: _EngineProcess, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        if process is self._process:
            self._info, self._tokenizer = info, tokenizer
            self.state = "ready"
            self.down.clear()
            self._ready.set()

    def on_outcomes(self, outcomes: Iterable[tuple[Stream, Delta | RequestError, bool]]) -> None:
        now = time.perf_counter()
        for stream, item, last in outcomes:
            if stream.ended:
                continue
            if last:
                self._forget(stream)
            if isinstance(item, RequestError):
                stream.fail(item)
            else:
                if item.token_ids:
                    if before := stream.latest.get(item.sample):
                        self._on_more(now - before, len(item.token_ids))
                    stream.latest[item.sample] = now
                stream.put(item, last)

    def on_counters(self, stats: EngineStats) -> None:
        self.stats = stats
        self._on_stats(stats)

    def on_reply(self, reply: Reply) -> None:
        answer = self._replies.pop(reply.id, None)
        if answer is not None and not answer.done():
            if reply.error:
                answer.set_exception(RequestError(reply.error))
            else:
                answer.set_result(reply.value)

    def on_death(self, process: _EngineProcess, cause: str) -> None:
        if process is not self._process:
            return
        was, self.failure = self.state, cause
        self._process = None
        self._ready.clear()
        self.down.set()
        self.stats = EngineStats()
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - _HOUR:
            self._deaths.popleft()
        # An engine that could not start will not start next time either.
        again = was == "ready" and len(self._deaths) <= self.max_restarts
        if was == "ready" or self._deaths:
            log.error("the engine %s%s", cause, "; it is started again" if again else "")
        self._fail_all(EngineDown(f"the engine {cause.splitlines()[0]}"))
        if again:
            self._launch()
        else:
            self.state = "failed"
            self.failed.set()

    def _forget(self, stream: Stream) -> bool:
        if self._streams.pop(stream.id, None) is None:
            return False
        self.samples -= len(stream.watches)
        return True

    def _fail_all(self, error: EngineDown) -> None:
        streams, self._streams, self.samples = self._streams, {}, 0
        for stream in streams.values():
            stream.fail(error)
        replies, self._replies = self._replies, {}
        for answer in replies.values():
            if not answer.done():
                answer.set_exception(error)

    # In the output thread.

    def translate(self, batch: Batch) -> list[tuple[Stream, Delta | RequestError, bool]]:
        """Tokens to text. Each: the stream, its news, and whether that was all."""
        outcomes: list[tuple[Stream, Delta | RequestError, bool]] = []
        for news in batch.news:
            stream = self._streams.get(news.id)
            if stream is None:
                continue
            if news.reason == "rejected":
                outcomes.append((stream, RequestError(news.detail, status=news.status), True))
            elif news.sample in stream.open:
                outcomes.append((stream, self._delta(stream, news), not stream.open))
        return outcomes

    def _delta(self, stream: Stream, news: News) -> Delta:
        watch, tokens, reason = stream.watches[news.sample], news.tokens, news.reason
        before = watch.tokens
        text, stopped = watch.push(tokens[:-1] if news.hidden else tokens)
        if stopped:
            tokens = tokens[: watch.tokens - before]
            if reason is None and (process := self._process) is not None:
                process.send(self._encoder.encode(Finish(news.id, news.sample, watch.tokens)))
            reason = "stop"
        elif reason is not None:
            text += watch.flush()
        if reason is not None:
            stream.open.discard(news.sample)
        stream.cached = news.cached
        return Delta(
            news.sample,
            text,
            tuple(tokens),
            _read(news.logprobs[: len(tokens)]),
            _read(news.prompt_logprobs),
            reason,  # type: ignore[arg-type]  # Its module is checked without strict_optional.
        )


def _read(logprobs: Sequence[LogprobWire]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(logprob, tuple(top)) for logprob, top in logprobs)


class _EngineProcess:
    """One life of the engine's process. A thread starts it, hears it and sees it die."""

    def __init__(self, client: EngineClient) -> None:
        self._client, self._loop = client, client._loop
        self._sending = threading.Lock()
        self._commands: zmq.Socket[bytes] | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._stopping = False
        self._said = ""
        """Its last words."""
        self.thread = threading.Thread(target=self._run, name="dovetail-output", daemon=True)

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    def send(self, command: bytes) -> None:
        """A Command, encoded; from any thread. To a dead process nothing is sent: its death is on the way."""
        with self._sending:
            if self._commands is not None:
                self._commands.send(command)

    def stop(self) -> None:
        """Blocks until the process is gone."""
        self._stopping = True
        if self._channel is not None:
            try:
                self._channel.send({"op": "stop"})
            except (ChannelClosed, OSError):
                pass  # It is dead already.
        self.thread.join(_STOP_SECONDS)
        if self.thread.is_alive() and self._popen is not None:
            log.warning("the engine did not end within %g s and is killed", _STOP_SECONDS)
            self._popen.kill()
            self.thread.join()

    def _run(self) -> None:
        try:
            # mkdtemp's mode is 0700: nobody else can connect.
            with tempfile.TemporaryDirectory(prefix="dovetail-") as folder, zmq.Context() as context:
                cause = self._serve(context, Path(folder))
        except Exception as error:
            log.exception("the thread that listens to the engine failed")
            cause = f"cannot be heard any more: {error!r}"
        finally:
            if self._popen is not None and self._popen.poll() is None:
                self._popen.kill()
                self._popen.wait()
        self._call(self._client.on_death, self, cause)

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> str:
        commands, outputs = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        addresses = {"commands": f"ipc://{folder}/commands", "outputs": f"ipc://{folder}/outputs"}
        try:
            for sock, address in zip((commands, outputs), addresses.values(), strict=True):
                sock.linger = 0
                sock.set_hwm(0)
                sock.bind(address)
            composition = self._client.composition
            self._popen, self._channel = start_process("dovetail.core.serving.engine_process:main")
            order = {"overrides": list(composition.overrides), "identity": identity(composition), **addresses}
            self._channel.send(order)
            if self._stopping:
                self._channel.send({"op": "stop"})
            with self._sending:
                self._commands = commands
            self._listen(outputs, self._channel)
            return self._cause(self._popen)
        finally:
            with self._sending:
                self._commands = None
            commands.close()
            outputs.close()
            if self._channel is not None:
                self._channel.close()

    def _cause(self, popen: subprocess.Popen[bytes]) -> str:
        try:
            status = popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            popen.kill()
            status = popen.wait()
        return self._said or describe_exit(status, "serving" if self._client.state == "ready" else "starting")

    def _listen(self, outputs: zmq.Socket[bytes], channel: Channel) -> None:
        """Until the process closes its end."""
        client = self._client
        decoder = msgspec.msgpack.Decoder(Output)
        poller = zmq.Poller()
        poller.register(outputs, zmq.POLLIN)
        poller.register(channel.fileno(), zmq.POLLIN)
        while True:
            for source, _ in poller.poll():
                if source is not outputs:
                    try:
                        self._heard(*channel.recv())
                    except ChannelClosed:
                        return
                    continue
                message = decoder.decode(outputs.recv())
                if isinstance(message, Reply):
                    self._call(client.on_reply, message)
                    continue
                if message.stats is not None:
                    self._call(client.on_counters, message.stats)
                if message.news and (outcomes := client.translate(message)):
                    self._call(client.on_outcomes, outcomes)

    def _heard(self, message: dict[str, Any], raw: bytes) -> None:
        client = self._client
        if message["op"] == "ready":
            info = msgspec.convert(message["info"], EngineInfo)
            folder = None if info.folder is None else Path(info.folder)
            has_tokenizer = folder is not None and (folder / "tokenizer.json").is_file()
            self._call(client.on_ready, self, info, Tokenizer(folder) if folder and has_tokenizer else None)
        elif message["op"] == "error":
            self._said = f"failed: {message['text']}"
        elif message["op"] == "progress":
            client.phase = message["phase"]

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the event loop is closed: %s came too late", function.__name__)
