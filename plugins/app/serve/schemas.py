"""Request bodies. Unknown fields are refused, and so are OpenAI fields that request unsupported features."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    StringConstraints,
    model_validator,
)
from pydantic_core import CoreSchema

from dovetail.plugins.app.serve.config import MOST_ITEMS

MOST = 2**31 - 1
MOST_KEYS = 1024
"""Maximum number of keys of an object that is validated key by key."""
MOST_VALUE_BYTES = 1 << 20
"""Maximum size of a JSON value of any form, such as a schema."""
_T = TypeVar("_T")


class _FailFast:
    """pydantic.FailFast, which cannot be hashed and so not be part of a union."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: dict[str, Any] = {**handler(source), "fail_fast": True}
        assert schema["type"] == "list"
        return cast(CoreSchema, schema)


Many = Annotated[list[_T], _FailFast()]
"""List whose validation ends at its first mistake: pydantic would record one for each of millions of entries, and each
takes a kilobyte."""


def _few_items(value: object) -> object:
    if isinstance(value, list) and len(value) > MOST_ITEMS:
        raise ValueError(f"has {len(value)} items; the limit is {MOST_ITEMS}")
    return value


# Before the validation: pydantic also validates items that are too many.
Items = Annotated[Many[_T], BeforeValidator(_few_items)]
"""List of objects or texts, whose validation takes longer than that of numbers."""
Token = Annotated[int, Field(ge=0, le=MOST)]


def _token(key: str) -> int:
    if (token := int(key)) > MOST:
        raise ValueError(f"token id {key} is above {MOST}")
    return token


TokenKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$"), AfterValidator(_token)]
"""Token id as the key of an object, where JSON has only strings."""
Bias = Annotated[float, Field(ge=-100, le=100)]
Text = Annotated[str, StringConstraints(max_length=16 << 20)]
Label = Annotated[str, StringConstraints(max_length=512)]
Stop = Annotated[str, StringConstraints(max_length=1024)]
"""Stop string; matched against the end of the output after every token."""


def _sendable(value: object) -> object:
    """Refuse a large value, and one that cannot be encoded again, such as a lone surrogate: valid in JSON but not in
    UTF-8."""
    try:
        if (size := len(msgspec.json.encode(value))) <= MOST_VALUE_BYTES:
            json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON again ({type(error).__name__})") from None
    if size > MOST_VALUE_BYTES:
        raise ValueError(f"has {size} bytes as JSON; the limit is {MOST_VALUE_BYTES}")
    return value


def _few_keys(value: object) -> object:
    if isinstance(value, dict) and len(value) > MOST_KEYS:
        raise ValueError(f"has {len(value)} keys; the limit is {MOST_KEYS}")
    return value


# Before the validation, which would record each mistake.
_Sendable, _FewKeys = BeforeValidator(_sendable), BeforeValidator(_few_keys)
Json = Annotated[JsonValue, _Sendable]
JsonObject = Annotated[dict[str, JsonValue], _Sendable]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        return _few_keys(given)


class StreamOptions(Body):
    include_usage: bool = False
    """End the stream with a chunk of token counts."""
    include_obfuscation: bool = False
    """Accepted without effect."""
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
    """Fields of all endpoints that use the engine. The OpenAI client passes Dovetail's own fields in `extra_body`."""

    model: Label | None = None
    """Model listed by /v1/models; null: the base model."""
    user: Label | None = None
    """User for the scheduler (scheduler=fair divides capacity between users)."""
    prompt_cache_key: Label | None = None
    """Used as cache_salt if that is not set."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """Priority; lower values run first (scheduler=priority)."""
    cache_salt: Label | None = None
    """Cached prefixes are shared only between requests with the same salt."""
    hints: Annotated[dict[Label, float], _FewKeys, Field(max_length=64)] | None = None
    """Numbers for the scheduler, such as the expected output length."""
    timeout: float | None = Field(None, gt=0, le=1e6)
    """Maximum seconds from arrival to the end of the request."""


class Common(Queued):
    """Fields of all endpoints that generate text."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: JsonObject | None = None
    """Accepted without effect."""
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Label | None = None

    top_k: int | None = Field(None, ge=-1, le=MOST)
    """Keep the k most likely tokens; 0 or -1: all."""
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    min_tokens: int | None = Field(None, ge=0, le=MOST)
    stop_token_ids: Annotated[Many[Token], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    """Keep the stop string in the output."""
    regex: Text | None = None
    """Regular expression that the whole output must match."""
    choice: Annotated[Items[Text], Field(min_length=1)] | None = None
    """Strings, one of which the output must be."""
    grammar: Text | None = None
    """Grammar that the output must follow, in llguidance's dialect of Lark."""
    extra: Annotated[dict[Label, Json], _FewKeys] | None = None
    """Parameters of logits processors from plugins."""


class Penalised(Common):
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenKey, Bias], _FewKeys, Field(max_length=1024)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[Many[Stop], Field(max_length=64)] | None = None
    response_format: ResponseFormat | None = None


def _few_prompts(value: object) -> object:
    return value if isinstance(value, list) and value and isinstance(value[0], int) else _few_items(value)


Prompts = Annotated[
    Text
    | Annotated[Many[Text], Field(min_length=1)]
    | Annotated[Many[Token], Field(min_length=1)]
    | Annotated[Many[Annotated[Many[Token], Field(min_length=1)]], Field(min_length=1)],
    BeforeValidator(_few_prompts),
]
"""Text or token ids, or a list of either for several prompts."""


class CompletionRequest(Penalised):
    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0, le=MOST)
    """Maximum number of output tokens; null: 16. 0 with echo returns only the prompt."""
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    """Number of samples drawn; the n with the highest mean log-probability are returned. Not with stream."""
    echo: bool | None = None
    """Prepend the prompt to the text."""
    logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool | None = None
    """Add the ids of the output tokens to each choice, as `token_ids`."""
    suffix: Text | None = None
    """Not supported: refused unless empty."""


class ContentPart(BaseModel):
    """Part of a message; only text is supported."""

    model_config = ConfigDict(extra="allow")

    type: Label
    text: Text | None = None


Ignored = Annotated[JsonValue, _Sendable, Field(exclude=True)]
"""Field of OpenAI's answers, accepted without effect when an answer is sent back."""


class FunctionCall(Body):
    name: Label
    arguments: Text
    parsed_arguments: Ignored = None


class ToolCall(Body):
    id: Label
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Ignored = None
    """Position in a streamed answer."""


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Items[ContentPart] | None = None
    name: Label | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: Label | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None
    annotations: Ignored = None
    parsed: Ignored = None
    audio: Annotated[None, Field(exclude=True)] = None
    """Not supported: refused unless null."""
    function_call: Annotated[None, Field(exclude=True)] = None
    """Not supported: refused unless null; use `tool_calls`."""

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role} needs content")
        return self


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
    """Fields of all endpoints that build the prompt with a chat template."""

    parallel_tool_calls: bool | None = None
    """false: a forced tool call is a single one."""
    tool_parser: Label | None = None
    """Format of tool calls in the output; null: serve.tool_parser."""
    reasoning_parser: Label | None = None
    """Format of reasoning in the output; null: serve.reasoning_parser."""
    chat_template_kwargs: JsonObject | None = None
    """Variables for the chat template."""


class Prediction(Body):
    """Text that the answer probably repeats, such as a file to edit."""

    type: Literal["content"]
    content: Text | Items[ContentPart]


class ChatRequest(Penalised, Conversing):
    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST)
    max_tokens: int | None = Field(None, ge=1, le=MOST)
    """Older name of max_completion_tokens. With neither, the context length is the limit."""
    n: int | None = Field(None, ge=1, le=128)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[Many[ToolDefinition], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    reasoning_effort: Label | None = None
    """Passed to the chat template."""
    add_generation_prompt: bool = True
    """Let the template begin the assistant's turn."""
    continue_final_message: bool = False
    """Continue the last message instead of starting a new turn."""
    store: Literal[False] | None = None
    modalities: Many[Literal["text"]] | None = None
    prediction: Prediction | None = None
    """Predicted output: tokens of it that come true are drafts (spec_decode=suffix). It changes no text."""


class ResponseItem(BaseModel):
    """Input item: a message, or an output item of an earlier response. The required fields depend on the type;
    additional fields of output items are ignored."""

    model_config = ConfigDict(extra="allow")

    type: Label = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | Items[ContentPart] | None = None
    call_id: Label | None = None
    name: Label | None = None
    arguments: Text | None = None
    output: Text | Items[ContentPart] | None = None


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Label | None = None


class ReasoningOptions(Body):
    effort: Label | None = None
    """Passed to the chat template as reasoning_effort."""
    summary: Literal["auto"] | None = None
    """Accepted without effect: the full reasoning is returned."""


class FunctionTool(Function):
    type: Literal["function"]


class NamedFunctionTool(NamedFunction):
    type: Literal["function"]


class ResponsesRequest(Common, Conversing):
    input: Text | Annotated[Items[ResponseItem], Field(min_length=1)]
    instructions: Text | None = None
    """System message placed before the input."""
    max_output_tokens: int | None = Field(None, ge=1, le=MOST)
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    store: Literal[False] | None = None
    """Responses are never stored."""
    background: Literal[False] | None = None
    previous_response_id: Label | None = None
    """Not supported, since responses are not stored: send the whole conversation."""
    tools: Annotated[Many[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    include: Many[Literal["reasoning.encrypted_content"]] | None = None
    """Accepted without effect: reasoning is returned in plain text and can be sent back as such."""
    reasoning: ReasoningOptions | None = None


class EmbeddingRequest(Queued):
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    """Encoding of vectors; base64: of little-endian float32 values."""
    dimensions: int | None = Field(None, ge=1, le=MOST)
    """Truncate embeddings to this size, for models trained for it."""


class LoadAdapterRequest(Body):
    lora_name: Label
    """Model name for requests that use the adapter."""
    lora_path: Annotated[str, StringConstraints(max_length=4096)]
    """Folder of the adapter, inside serve.adapter_root."""
    load_inplace: Literal[False] | None = None
    """Not supported: unload the adapter first."""


class UnloadAdapterRequest(Body):
    lora_name: Label
    lora_int_id: int | None = None
    """Accepted without effect."""


class TokenizeRequest(Body):
    model: Label | None = None
    prompt: Text | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    """Alternative to `prompt`: messages rendered with the chat template."""
    add_special_tokens: bool = True
    """Let the tokenizer add its special tokens, usually a leading BOS, to `prompt`."""
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: Label | None = None
    tokens: Many[Token]
