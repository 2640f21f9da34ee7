"""Options of the app `serve`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from dovetail.core.compose import ENGINE_NODES, AppConfig

HostName = Annotated[str, StringConstraints(to_lower=True, pattern=r"^(\*|(\*\.)?[A-Za-z0-9_.-]+)$")]
"""Name of a host without scheme and port, `*.domain` or `*`."""
MOST_ITEMS = 1 << 14
"""Maximum number of prompts, of messages and of parts of one message: nothing else runs while they are validated."""


class ServeConfig(AppConfig):
    """Serve the OpenAI API over HTTP. The engine runs in a separate process."""

    needs: ClassVar[tuple[str, ...]] = (*ENGINE_NODES, "tool_parser", "reasoning_parser")

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface. Any address but loopback needs API keys or `open`."""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port; 0: any free port, which is logged."""
    processes: int = Field(1, ge=1)
    """Front-end processes that share the port and do HTTP, chat templates and detokenization, one core each. With more
    than one, an additional process supervises the engines."""
    front_end_timeout: float | None = Field(30.0, gt=0)
    """Seconds without an event-loop iteration after which a front-end process counts as hung and is restarted. Applies
    if `processes` > 1. null: no limit."""
    model_names: tuple[str, ...] = ()
    """Model names accepted in requests; answers state the first. Empty: the name of the checkpoint or component."""
    chat_template: str | None = None
    """File with a Jinja chat template; null: the template of the checkpoint."""
    template_timeout: float = Field(5.0, gt=0)
    """Maximum seconds for which the chat template may run for one request; then the request is refused. The template
    runs in a separate process, which is killed then, with a memory limit of 1 GiB."""

    tool_parser: str = "auto"
    """Name of the parser for tool calls; auto: the first that fits the chat template. The server does not start with a
    parser whose format the template lacks, if it has that of another. A request can override it with its `tool_parser`
    field."""
    reasoning_parser: str = "auto"
    """Name of the parser for reasoning, chosen like `tool_parser`; none: reasoning stays in the content."""

    pooling: Literal["auto", "last", "mean"] = "auto"
    """Pooling of hidden states in /v1/embeddings: last token, or mean. auto: as the sentence-transformers files in the
    model's folder specify; without them, requests are refused."""
    matryoshka: bool = False
    """Let requests truncate embeddings to any `dimensions`, even if config.json does not declare that the model
    supports it."""

    max_waiting: int = Field(1024, ge=0)
    """Maximum number of queued samples, beyond the running ones (engine.max_seqs); more get 429 with Retry-After."""
    max_body_bytes: int = Field(8 << 20, ge=1024)
    """Maximum size of a request body, bytes; larger ones get 413."""
    max_prompts: int = Field(2048, ge=1, le=MOST_ITEMS)
    """Maximum number of prompts in one request."""
    receive_timeout: float = Field(60.0, gt=0)
    """Seconds within which a request's headers must arrive, and then its body; else 408."""
    timeout: float | None = Field(None, gt=0)
    """Maximum seconds from a request's arrival to its end; then it fails with 504. The request field `timeout` can only
    shorten it. null: no limit."""
    grace: float = Field(30.0, ge=0)
    """Seconds for running requests to finish after SIGTERM; new ones are refused. Ctrl-C cuts them off at once."""

    on_engine_failure: Literal["restart", "exit"] = "restart"
    """If the engine or one of its ranks dies: restart it, or end the server with exit code 1."""
    engine_timeout: float | None = Field(120.0, gt=0)
    """Seconds without a completed step after which an engine that has requests counts as hung and is treated as dead.
    Must exceed the longest step, including kernel compilation. null: no limit."""
    max_restarts: int = Field(5, ge=1)
    """Maximum restarts within an hour; one more failure ends the server."""

    api_key_file: str | None = None
    """File of accepted API keys, one per line as `name:hash` or `hash`, with the SHA-256 in hex. The environment
    variable DOVETAIL_API_KEYS holds plain keys, separated by commas. With neither, no key is required, and the server
    listens only on loopback addresses unless `open` is set."""
    open: bool = False
    """Without API keys, also listen on addresses that other machines can reach."""
    allowed_hosts: tuple[HostName, ...] = ()
    """Names accepted in the header `Host`; "*.example.org": any name below, "*": any. IP addresses are always accepted.
    Empty: any name if API keys are set, else localhost and `host`. Others get 403."""
    cache_isolation: Literal["key", "salt"] = "key"
    """Scope of cached prefixes. key: shared by requests with the same API key and `cache_salt`; salt: by all requests
    with the same `cache_salt`."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages whose scripts may call the server; "*": any. Empty: only the server's own page."""

    adapter_root: str | None = None
    """Folder from which clients may load and unload adapters, with POST /v1/load_lora_adapter and
    /v1/unload_lora_adapter; null: only the adapters in adapter.load."""

    page: bool = True
    """Serve the web page at / with chat, composition and live charts."""
    debug: bool = False
    """Serve POST /debug/check, which runs the integrity check of the KV allocator."""
    log_requests: bool = False
    """Log one line per request, never its text: method, path, status, duration, `x-request-id`, name of the API key,
    and the numbers of prompt, cached and output tokens."""
    traces: str | None = None
    """URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces. Each request is a span with times and
    token counts, never its text. Needs the extra `otel`."""
    log_format: Literal["text", "json"] = "text"
    """Log format; json: one object per line."""
