"""Options of the app `serve`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dovetail.core.compose import ENGINE_NODES, AppConfig


class ServeConfig(AppConfig):
    """Serve the OpenAI API over HTTP. The engine runs in a process of its own."""

    needs: ClassVar[tuple[str, ...]] = (*ENGINE_NODES, "tool_parser", "reasoning_parser")

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface (set api_key_file too)."""
    port: int = Field(8000, ge=0, le=65535)
    """0: a free one, which the log names."""
    processes: int = Field(1, ge=1)
    """Processes that answer on that port, each on a core of its own: HTTP, chat templates, tokens to text. One more
    than that owns the engines then."""
    front_end_timeout: float | None = Field(30.0, gt=0)
    """Seconds in which the event loop of one of several `processes` does not turn; then it hangs, and is killed and
    started again. null: for ever."""
    model_names: tuple[str, ...] = ()
    """What requests may call the model; the first stands in answers. Empty: the name of its folder or component."""
    chat_template: str | None = None
    """File with a Jinja chat template; null: the one in the model's folder."""

    tool_parser: str = "auto"
    """Format of tool calls in outputs, by name; auto: the first that fits the chat template. A request's own
    `tool_parser` goes before it."""
    reasoning_parser: str = "auto"
    """The same for reasoning; none leaves it in the content."""

    pooling: Literal["auto", "last", "mean"] = "auto"
    """How /v1/embeddings makes a text's hidden states one vector: of the last token, or their mean. auto: as
    sentence-transformers' files beside the weights say; a model without them is refused."""
    matryoshka: bool = False
    """Let requests cut embeddings to any `dimensions`, also where config.json does not say that the model was trained
    so."""

    max_waiting: int = Field(1024, ge=0)
    """Samples that may wait beyond those that run (engine.max_seqs); more get 429 with Retry-After."""
    max_body_bytes: int = Field(8 << 20, ge=1024)
    """Bytes of a request's body at most; more get 413."""
    max_prompts: int = Field(256, ge=1)
    """Prompts in one request at most."""
    receive_timeout: float = Field(60.0, gt=0)
    """Seconds in which a request's head must arrive, and after it the body; else 408."""
    timeout: float | None = Field(None, gt=0)
    """Seconds that a request may take, from its arrival; then it ends with 504. A request's own `timeout` can only
    shorten it. null: no limit."""
    grace: float = Field(30.0, ge=0)
    """Seconds after SIGTERM in which running requests may finish; new ones are refused. After Ctrl-C they have none."""

    on_engine_failure: Literal["restart", "exit"] = "restart"
    """When the engine or one of its ranks dies: start it again, or end the server with exit code 1."""
    engine_timeout: float | None = Field(120.0, gt=0)
    """Seconds without a sign of life from an engine that has requests; then it hangs and counts as dead. A sign comes
    with every step, so it must outlast the longest one, kernels that it compiles included. null: for ever."""
    max_restarts: int = Field(5, ge=1)
    """Restarts within an hour; one more failure ends the server."""

    api_key_file: str | None = None
    """File of accepted API keys, one a line as `name:hash` or `hash`: SHA-256 in hex. The environment variable
    DOVETAIL_API_KEYS holds keys themselves, separated by commas. Neither: no key is needed."""
    cache_isolation: Literal["key", "salt"] = "key"
    """Who shares cached prefixes: key = only requests with the same API key and `cache_salt`; salt = all requests with
    the same `cache_salt`."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages whose scripts may call the server; "*" is any. Empty: none but its own."""

    adapter_root: str | None = None
    """Folder in which clients may name folders of adapters to load, by POST /v1/load_lora_adapter, and to unload
    again; null: nobody loads any but the operator (adapter.load)."""

    page: bool = True
    """The page at / : chat, composition and live charts."""
    debug: bool = False
    """POST /debug/check: the KV allocator's own integrity check."""
    log_requests: bool = False
    """One log line a request: endpoint, status, times, token counts. Never its text."""
    traces: str | None = None
    """Where an OpenTelemetry collector takes spans over HTTP, such as http://localhost:4318/v1/traces: one a request,
    with times and token counts, never its text. Needs the extra `otel`."""
    log_format: Literal["text", "json"] = "text"
    """json: one object a line."""
