"""Trial forward on the meta device: it shows how a model of transformers calls attention, without weights.

Shapes: T tokens, H query heads, K kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from dovetail.core.errors import ConfigError
from dovetail.plugins.model.transformers.library import Library, error_text
from dovetail.plugins.model.transformers.rope import fixed_rope
from dovetail.plugins.model.transformers.watch import Watch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIAL = "dovetail_trial"
"""Name of the recording implementation in transformers' interfaces of attention and of masks."""

TOKENS = 4
_KNOWN = {
    "dropout",
    "is_causal",
    "sliding_window",
    "position_ids",
    "cache_position",
    "softcap",
    "s_aux",
}
"""Arguments of an attention call that change nothing here, that the mask states too, or that AttentionCall has."""


@dataclass(frozen=True)
class AttentionCall:
    """One layer's call of attention."""

    layer: int
    module: str
    """Path of the calling module."""
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    """At most head_dim."""
    scale: float
    window: int
    """0 = the layer sees all earlier tokens."""
    soft_cap: float
    """0 = scores are not capped."""
    sinks: str
    """Path of the parameter that has each head's sink; "" = none."""


@dataclass
class _Recorder:
    library: Library
    names: dict[int, str]
    """id of a module or parameter -> its path."""
    watch: Watch | None = None
    masks: list[tuple[torch.Tensor, int | None]] = field(default_factory=list)
    """Masks that were made, with their windows; None = neither causal nor a causal window."""
    calls: list[AttentionCall] = field(default_factory=list)

    def window(self, mask: torch.Tensor | None, stated: int | None) -> int:
        """Return the window of a mask. `stated`: the call's sliding_window, for implementations without masks."""
        if mask is None and not stated:
            return 0
        found = next((window for made, window in self.masks if made is mask), None)
        if found is None:
            raise self.library.refused("its attention mask is neither causal nor a causal sliding window")
        return found

    def sinks(self, given: torch.Tensor | None) -> str:
        if given is None:
            return ""
        if (path := self.names.get(id(given))) is None:
            raise self.library.refused("its attention sinks are not a parameter")
        return path


_recorder: ContextVar[_Recorder] = ContextVar("recorder")


def _record_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    **others: Any,
) -> torch.Tensor:
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    _recorder.get().masks.append((mask, _window_of(mask_function, local_size or 0)))
    return mask


def _window_of(mask_function: Callable[..., torch.Tensor], size: int) -> int | None:
    """Return `size` if the mask is causal with that window, at positions around its multiples; otherwise None."""
    near = (0, 1, 2, 3, *(size * times + offset for times in (1, 2, 3) for offset in (-2, -1, 0, 1, 2)))
    at_N = torch.tensor(sorted({position for position in near if position >= 0}), device="cpu")
    q, kv, zero = at_N[:, None], at_N[None, :], torch.zeros((), dtype=torch.int64, device="cpu")
    expected = (kv <= q) & ((kv > q - size) if size else True)
    try:
        found = torch.broadcast_to(mask_function(zero, zero, q, kv), expected.shape)
        return size if torch.equal(found.bool(), expected) else None
    except (RuntimeError, IndexError, NotImplementedError):  # It reads padding or blocks of this batch.
        return None


def _record_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    recorder = _recorder.get()
    library = recorder.library
    given = {name for name, value in others.items() if value is not None and value is not False}
    if unknown := sorted(given - _KNOWN):
        raise library.refused(f"its attention has arguments that are not supported: {', '.join(unknown)}")
    if key.shape[2] != query.shape[2] or query.shape[2] != TOKENS:
        raise library.refused("its layers attend to other tokens than their own (cross attention or shared K and V)")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise library.refused("its layers attend to later tokens")
    _, heads, tokens, dim = query.shape
    if value.shape[-1] > dim:
        raise library.refused(f"its values have {value.shape[-1]} dimensions a head, more than the {dim} of its keys")
    if recorder.watch is not None:
        recorder.watch.attended(recorder.names.get(id(module), ""), query, key)
    recorder.calls.append(
        AttentionCall(
            layer=getattr(module, "layer_idx", -1),
            module=recorder.names.get(id(module), ""),
            heads=heads,
            kv_heads=key.shape[1],
            head_dim=dim,
            v_dim=value.shape[-1],
            scale=dim**-0.5 if scaling is None else float(scaling),
            window=recorder.window(attention_mask, others.get("sliding_window")),
            soft_cap=float(others.get("softcap") or 0.0),
            sinks=recorder.sinks(others.get("s_aux")),
        )
    )
    return query.new_empty(1, tokens, heads, value.shape[-1]), None


def trial(
    library: Library, model: PreTrainedModel, watch: Watch | None = None, *, ids: bool = False
) -> tuple[AttentionCall, ...]:
    """Run `model`, which was built on the meta device with attention TRIAL, and return its calls in order of layers.
    Raises ConfigError for what the engine's attention cannot do. `watch`: gets q and k of each call. `ids`: compare
    with a run on token ids, since the engine gives a model embeddings alone."""
    named = (*model.named_modules(), *model.named_parameters())
    recorder = _Recorder(library, {id(one): path for path, one in named}, watch)
    reset = _recorder.set(recorder)
    given = _run(library, model, ids=True) if ids else None
    recorder.calls.clear()
    try:
        done = _run(library, model)
    except ConfigError as error:
        if given is None or not isinstance(error.__cause__, Exception):
            raise
        raise library.refused("it cannot run on embeddings of its tokens, only on their ids") from error.__cause__
    finally:
        _recorder.reset(reset)
    if given is not None and (extra := given - done):
        raise library.refused(f"it uses token ids for more than its embedding ({', '.join(sorted(extra))})")
    return _ordered(library, recorder.calls)


class _Work(TorchDispatchMode):
    """Count of the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name != "_to_copy":
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def _run(library: Library, model: PreTrainedModel, ids: bool = False) -> Counter[str]:
    """Run the model on token ids, or on what its embedding makes of them, and return the operations."""
    try:
        with torch.no_grad(), torch.device("meta"), fixed_rope(model), _Work() as work:
            tokens = torch.zeros(1, TOKENS, dtype=torch.long)
            given = {"input_ids": tokens} if ids else {"inputs_embeds": model.get_input_embeddings()(tokens)}
            # A padding mask keeps transformers from comparing positions, whose values a meta tensor lacks. Hybrid
            # classes look for padding in it, so that it has values.
            model(
                **given,
                position_ids=torch.arange(TOKENS)[None],
                attention_mask=torch.ones(1, TOKENS, dtype=torch.long, device="cpu"),
                use_cache=False,
            )
    except ConfigError:
        raise
    except Exception as error:  # The library's code fails in its own ways for what it cannot trace.
        values = isinstance(error, NotImplementedError) or "meta tensor" in str(error)
        why = "its code reads values of tensors, and a trial has none" if values else "a trial without weights fails"
        raise library.refused(f"{why}: {error_text(error)}") from error
    return work.count


def _ordered(library: Library, calls: Sequence[AttentionCall]) -> tuple[AttentionCall, ...]:
    layers = library.config.num_hidden_layers
    times = Counter(call.layer for call in calls)
    lacking = [str(layer) for layer in range(layers) if not times[layer]]
    if lacking:
        raise library.refused(f"layers {', '.join(lacking[:8])} of {layers} have no attention (state-space or hybrid)")
    if len(calls) != layers:
        raise library.refused(f"its {layers} layers call attention {len(calls)} times")
    shapes = {(call.heads, call.kv_heads, call.head_dim) for call in calls}
    if len(shapes) > 1:
        listed = " and ".join(map(str, sorted(shapes)))
        raise library.refused(f"its layers differ in (heads, kv heads, head dim): {listed}")
    return tuple(sorted(calls, key=lambda call: call.layer))


AttentionInterface.register(TRIAL, _record_attention)
AttentionMaskInterface.register(TRIAL, _record_mask)
