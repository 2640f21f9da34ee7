"""Observation of a trial forward: which matrices read one input, and where q and k are rotated right before attention.

Shapes: T tokens, H query heads, K kv heads, D head dim, R columns of cos or of sin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from dovetail.core.interfaces import Rope
from dovetail.core.ops.kv_write import rotate

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

ROTATION = "apply_rotary_pos_emb"
"""Name, in every modeling file of transformers, of the function that rotates q and k."""


@dataclass(frozen=True)
class Angles:
    """Call of a module that returned cos and sin."""

    module: str
    """Path of the module."""
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for calls that give the same angles at the same positions."""
        plain = [value for value in self.arguments if not isinstance(value, torch.Tensor)]
        named = {name: value for name, value in self.named.items() if not isinstance(value, torch.Tensor)}
        return repr((self.module, plain, named))


@dataclass(frozen=True)
class Rotation:
    """One call of ROTATION."""

    function: Callable[..., Any]
    q: torch.Tensor
    k: torch.Tensor
    angles: Angles
    width: int
    """Columns of cos."""


@dataclass
class Watch:
    """Context in which a trial is observed. The forward methods of attention modules are replaced within it."""

    model: PreTrainedModel
    matrices: frozenset[str]
    """Paths of the matrices."""
    attentions: frozenset[str]
    """Paths of the modules that call attention."""
    rotations: dict[str, Rotation] = field(default_factory=dict)
    """Path of an attention module -> rotation whose outputs are its q and k."""
    _inputs: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Path and input of each matrix, in order. Held, so that no other tensor gets the same identity."""
    _angles: list[tuple[torch.Tensor, torch.Tensor, Angles]] = field(default_factory=list)
    _rotated: dict[str, list[Rotation | None]] = field(default_factory=dict)
    """Calls of ROTATION by path; None = one with unknown arguments."""
    _hooks: list[Any] = field(default_factory=list)

    def __enter__(self) -> Watch:
        for path, module in self.model.named_modules():
            if path in self.matrices:
                self._hooks.append(module.register_forward_pre_hook(self._matrix_hook(path)))
            elif path in self.attentions:
                replace_rotation(module, partial(self._rotation_hook, path))
            elif not list(module.children()):
                self._hooks.append(module.register_forward_hook(self._angles_hook(path), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for path in self.attentions:
            restore_rotation(self.model.get_submodule(path))

    def attended(self, path: str, q: torch.Tensor, k: torch.Tensor) -> None:
        """Take note of a call of attention."""
        calls = self._rotated.get(path, [])
        if len(calls) == 1 and calls[0] is not None and calls[0].q is q and calls[0].k is k:
            self.rotations[path] = calls[0]

    def siblings(self) -> list[tuple[str, ...]]:
        """Return groups of matrices of one module that read the same tensor, in order."""
        groups: list[list[str]] = []
        last: tuple[str, torch.Tensor] | None = None
        for path, given in self._inputs:
            parent = path.rpartition(".")[0]
            if last is not None and last[0] == parent and last[1] is given:
                groups[-1].append(path)
            else:
                groups.append([path])
            last = parent, given
        seen = [path for path, _ in self._inputs]
        return [tuple(group) for group in groups if len(group) > 1 and all(seen.count(path) == 1 for path in group)]

    def _matrix_hook(self, path: str) -> Callable[..., None]:
        return lambda module, given: self._inputs.append((path, given[0]))

    def _angles_hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            if isinstance(output, tuple) and len(output) == 2 and all(isinstance(x, torch.Tensor) for x in output):
                self._angles.append((*output, Angles(path, arguments, named)))

        return hook

    def _rotation_hook(self, path: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def rotated(*given: Any, **named: Any) -> Any:
            output = function(*given, **named)
            found = None
            if len(given) == 4 and not named and isinstance(output, tuple) and len(output) == 2:
                _, _, cos, sin = given
                angles = next((one for *pair, one in self._angles if pair[0] is cos and pair[1] is sin), None)
                if angles is not None:
                    found = Rotation(function, *output, angles, cos.shape[-1])
            self._rotated.setdefault(path, []).append(found)
            return output

        return rotated


def replace_rotation(module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let the forward method of this module, and of no other, call make(ROTATION) in place of ROTATION. A module that
    does not call it stays as it is."""
    forward: Any = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names:
        return
    function = forward.__globals__.get(ROTATION)
    if function is None:
        return
    names = {**forward.__globals__, ROTATION: make(function)}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(own, module)


def restore_rotation(module: nn.Module) -> None:
    """Undo `replace_rotation`."""
    vars(module).pop("forward", None)


def rotated_pairs(function: Callable[..., Any], dim: int, width: int) -> int:
    """Return the number of pairs of columns that `function` rotates as this engine's kernels do, with `width` columns
    of cos, tried on random input in float32; 0 = it computes something else."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        q, k = (torch.randn(1, heads, 3, dim, generator=generator) for heads in (2, 1))
        for pairs in {width // 2, width}:
            if not 0 < 2 * pairs <= dim:
                continue
            angles = torch.rand(1, 3, pairs, generator=generator) * 6
            cos, sin = angles.cos(), angles.sin()
            given = [torch.cat((x, x), -1) if pairs < width else x for x in (cos, sin)]
            try:
                found = function(q, k, *given)
            except (RuntimeError, IndexError):  # It has columns of another layout.
                continue
            table_TR = torch.cat((cos, sin), -1)[0]
            expected = (rotate(x[0].transpose(0, 1), table_TR).transpose(0, 1)[None] for x in (q, k))
            if all(
                a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True)
            ):
                return pairs
    return 0


class RopeTables:
    """Tables of all positions, computed by the library's modules. Layers with the same angles share one."""

    def __init__(self, model: PreTrainedModel, max_len: int, device: torch.device) -> None:
        self.model, self.max_len, self.device = model, max_len, device
        self._tables: dict[str, Rope | None] = {}

    def of(self, rotation: Rotation, dim: int) -> Rope | None:
        """Return the table for heads of `dim` columns; None = kernels do not rotate this way."""
        pairs = rotated_pairs(rotation.function, dim, rotation.width)
        if not pairs:
            return None
        key = f"{rotation.angles.key} {pairs}"
        if key not in self._tables:
            self._tables[key] = self._table(rotation.angles, pairs)
        return self._tables[key]

    def _table(self, angles: Angles, pairs: int) -> Rope | None:
        module = self.model.get_submodule(angles.module)
        named = dict(zip(angles.named, self._given(angles.named.values()), strict=True))
        with torch.no_grad():
            cos, sin = module(*self._given(angles.arguments), **named)
        if cos.shape[0] != 1 or cos.shape[1] != self.max_len:
            return None
        halves = [x[0].split(pairs, dim=1) for x in (cos, sin)]
        valued = self.device.type != "meta"
        if valued and not all(torch.equal(half, parts[0]) for parts in halves for half in parts):
            return None
        return Rope(torch.cat([parts[0] for parts in halves], dim=1).float().contiguous())

    def _given(self, values: Iterable[Any]) -> list[Any]:
        """Return arguments with all positions, and float32 in place of activations, whose dtype cos and sin take."""
        positions = torch.arange(self.max_len, device=self.device)[None]
        state = torch.zeros(1, 1, 1, device=self.device)
        return [
            value if not isinstance(value, torch.Tensor) else state if value.is_floating_point() else positions
            for value in values
        ]
