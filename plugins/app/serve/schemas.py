"""Bodies of requests. Unknown fields are refused, and so are fields of OpenAI's that ask for what is not served."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints

MOST = 2**31 - 1
Token = Annotated[int, Field(ge=0, le=MOST)]
Text = Annotated[str, StringConstraints(max_length=16 << 20)]
Label = Annotated[str, StringConstraints(max_length=512)]
Stop = Annotated[str, StringConstraints(max_length=1024)]
"""Compared with the end of the output after every token."""


def _sendable(value: object) -> object:
    """JSON may hold what UTF-8 cannot, half of a surrogate pair; it would fail only in the answer that repeats it."""
    try:
        msgspec.json.encode(value)
    except (UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON again ({type(error).__name__})") from None
    return value


Json = Annotated[JsonValue, AfterValidator(_sendable)]
JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_sendable)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, strict=False)


class StreamOptions(Body):
    include_usage: bool = False
    """End the stream with a chunk of token counts."""
    include_obfuscation: bool = False
    """Accepted and without effect."""
    continuous_usage_stats: bool = False
    """Token counts in every chunk."""


class JsonSchema(Body):
    name: Label = ""
    description: Text | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Queued(Body):
    """What every endpoint takes that the engine works for. Dovetail's own fields go into `extra_body` of the OpenAI
    client."""

    model: Label | None = None
    """One of /v1/models; null: the only one."""
    user: Label | None = None
    """Reaches the scheduler (scheduler=fair shares between users)."""
    prompt_cache_key: Label | None = None
    """As cache_salt, where that is not given."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """Lower runs first (scheduler=priority)."""
    cache_salt: Label | None = None
    """Prefix pages are shared only between requests of equal salt."""
    hints: Annotated[dict[Label, float], Field(max_length=64)] | None = None
    """Numbers that schedulers may read, for instance the expected output length."""
    timeout: float | None = Field(None, gt=0, le=1e6)
    """Seconds from arrival after which the request ends."""


class Common(Queued):
    """What every generating endpoint takes."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    metadata: JsonObject | None = None
    """Accepted and without effect."""
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Label | None = None

    top_k: int | None = Field(None, ge=-1, le=MOST)
    """Keep the k most likely tokens; 0 or -1: all."""
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    min_tokens: int | None = Field(None, ge=0, le=MOST)
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    """Keep the stop string in the output."""
    regex: Text | None = None
    """The whole output matches this regular expression."""
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    """The output is one of these strings."""
    grammar: Text | None = None
    """The output follows this grammar, in llguidance's dialect of Lark."""
    extra: dict[Label, Json] | None = None
    """Parameters of logits processors from plugins."""


class Penalised(Common):
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[Token, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None


Prompts = (
    Text
    | Annotated[list[Text], Field(min_length=1)]
    | Annotated[list[Token], Field(min_length=1)]
    | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1)]
)
"""Text or token ids; several prompts as a list."""


class CompletionRequest(Penalised):
    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0, le=MOST)
    """16 where nothing is said. 0 with echo: the prompt alone."""
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    """Samples drawn, of which the n with the highest mean log-probability come back. Not with stream."""
    echo: bool | None = None
    """The prompt comes first in the text."""
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: Text | None = None
    """Not served: refused unless empty."""


class ContentPart(BaseModel):
    """A part of a message; text is all this server reads."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: Text | None = None


class FunctionCall(Body):
    name: Label
    arguments: Text


class ToolCall(Body):
    id: Label
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[ContentPart] | None = None
    name: Label | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Label | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None


class Function(Body):
    """A tool that the model may call."""

    name: Label
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolDefinition(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Label


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class Conversing(Body):
    """What endpoints take whose prompt comes from a chat template."""

    parallel_tool_calls: bool | None = None
    """false: a forced call is exactly one."""
    tool_parser: Label | None = None
    """Format of tool calls in the output; null: serve.tool_parser."""
    reasoning_parser: Label | None = None
    """Format of reasoning in the output; null: serve.reasoning_parser."""
    chat_template_kwargs: JsonObject | None = None
    """Variables for the chat template."""


class ChatRequest(Penalised, Conversing):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST)
    max_tokens: int | None = Field(None, ge=1, le=MOST)
    """The older name of max_completion_tokens. Neither: until the context is full."""
    n: int | None = Field(None, ge=1, le=128)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[ToolDefinition], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    reasoning_effort: Label | None = None
    """Handed to the chat template."""
    add_generation_prompt: bool = True
    """Let the template open the assistant's turn."""
    continue_final_message: bool = False
    """Go on with the last message in place of a new turn."""
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None


class ResponseItem(BaseModel):
    """Of the input: a message, or what an earlier answer had in its output. Which fields it needs depends on the
    type; others, which outputs also have, mean nothing here."""

    model_config = ConfigDict(extra="allow")

    type: Label = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | list[ContentPart] | None = None
    call_id: Label | None = None
    name: Label | None = None
    arguments: Text | None = None
    output: Text | list[ContentPart] | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Label = ""
    description: Text | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Label | None = None


class ReasoningOptions(Body):
    effort: Label | None = None
    """Handed to the chat template as reasoning_effort."""
    summary: Literal["auto"] | None = None
    """Accepted; there are no summaries, as the reasoning itself comes back."""


class FunctionTool(Function):
    type: Literal["function"]


class NamedFunctionTool(NamedFunction):
    type: Literal["function"]


class ResponsesRequest(Common, Conversing):
    input: Text | Annotated[list[ResponseItem], Field(min_length=1)]
    instructions: Text | None = None
    """Goes before the input as a system message."""
    max_output_tokens: int | None = Field(None, ge=1, le=MOST)
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    store: Literal[False] | None = None
    """Nothing is ever stored."""
    background: Literal[False] | None = None
    previous_response_id: Label | None = None
    """Not served, as nothing is stored: send the whole conversation."""
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Accepted: reasoning comes back in clear, and as such may be sent again."""
    reasoning: ReasoningOptions | None = None
    stream_options: StreamOptions | None = None


class EmbeddingRequest(Queued):
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    """base64: float32, little-endian."""
    dimensions: int | None = Field(None, ge=1, le=MOST)
    """Cut to so many numbers; for models trained so."""


class LoadAdapterRequest(Body):
    lora_name: Label
    """What requests will call their model."""
    lora_path: Annotated[str, StringConstraints(max_length=4096)]
    """Its folder, in serve.adapter_root."""
    load_inplace: Literal[False] | None = None
    """Not served: unload it first."""


class UnloadAdapterRequest(Body):
    lora_name: Label
    lora_int_id: int | None = None
    """Accepted and without effect."""


class TokenizeRequest(Body):
    model: Label | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    """In place of prompt: as the chat template renders them."""
    add_special_tokens: bool = True
    """Of a prompt: let the tokenizer add its own (a leading BOS, as a rule)."""
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: Label | None = None
    tokens: list[Token]
