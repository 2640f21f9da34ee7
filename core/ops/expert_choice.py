"""Tiles of routed experts as choices of tuning tables. This module does not import torch.

The first product's entry states how many rows a tile has. The second product has entries for each such number, since
its own tile depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from dovetail.core.errors import shown
from dovetail.core.interfaces.tuning import Choice, Key, make_key
from dovetail.core.ops.choices import Choices
from dovetail.core.ops.expert_tiles import BLOCK_BYTES, LEAST_ROWS, MOST_ROWS, SPECIALIZED, ExpertTile

UP, DOWN = "expert_up", "expert_down"
"""Names of the two products in tuning tables: gate and up in one, and down."""
KINDS = ("bf16", "fp8", "fp8_block", "int8")
"""Kinds of weights, as in core.ops.tile_choice."""
HOPPER = {"bf16": BLOCK_BYTES // 2, "fp8": BLOCK_BYTES, "fp8_block": BLOCK_BYTES, "int8": BLOCK_BYTES}
"""Kinds of weights that the kernel for Hopper multiplies, and the inputs of a block."""
TILE_ROWS = "tile_rows"
"""Field of the second product's key."""
LIMITS: Mapping[str, tuple[int, ...]] = {
    "rows": (16, 32, 64, 128),
    "outputs": (16, 32, 64, 128, 256),
    "inputs": (32, 64, 128, 256, 512),
    "warps": (4, 8),
    "stages": tuple(range(1, 9)),
    "residents": (0, 1, 2, 3),
}
"""Values that a choice may have."""


def expert_key(kind: str, experts: int, active: int, hidden: int, channels: int, tile_rows: int | None = None) -> Key:
    """Return the key of the first product, or of the second one with tiles of `tile_rows` rows. `kind`: one of KINDS.
    `experts`, `active`: those of the layer and of a token, shared ones among them. `channels`: those of an expert."""
    facts: dict[str, Any] = dict(weight=kind, experts=experts, active=active, hidden=hidden, channels=channels)
    return make_key(**facts) if tile_rows is None else make_key(**facts, **{TILE_ROWS: tile_rows})


Facts = tuple[str, int, int, int, int]
"""The first arguments of expert_key."""


def listed_tile(
    choices: Choices, op: str, gpu: str, facts: Facts, tokens: int, tile_rows: int | None = None
) -> ExpertTile | None:
    """Return the tile of the entry for so many tokens; None = the rule's. `tile_rows`: as in expert_key."""
    choice = choices.find(op, gpu, expert_key(*facts, tile_rows), tokens)
    return None if choice is None else tile_of(choice)


def tile_of(choice: Choice) -> ExpertTile:
    values: Mapping[str, Any] = choice
    return ExpertTile(**values)


def choice_of(tile: ExpertTile) -> Choice:
    return {name: value for name, value in asdict(tile).items() if name != "residents" or value}


def check_experts(key: Key, rows: int, choice: Choice) -> None:
    """Raise ValueError if an entry of a table cannot be the tile of this product."""
    facts: Mapping[str, Any] = dict(key)
    names = {"weight", "experts", "active", "hidden", "channels"}
    if set(facts) - {TILE_ROWS} != names:
        raise ValueError(
            f"the key of a product of experts has {', '.join(sorted(names))}; this one: {', '.join(facts)}"
        )
    if facts["weight"] not in KINDS:
        raise ValueError(f"weight is {shown(facts['weight'])}; there are {', '.join(KINDS)}")
    wanted = {field.name for field in fields(ExpertTile)}
    if missing := wanted - {"residents"} - set(choice):
        raise ValueError(f"a tile of experts needs {', '.join(sorted(missing))}")
    for name, value in choice.items():
        if name not in wanted:
            raise ValueError(f"a tile of experts has no {shown(name)}; it has {', '.join(sorted(wanted))}")
        if isinstance(value, bool) or value not in LIMITS[name]:
            raise ValueError(f"{name} is {shown(value)}, not one of {', '.join(map(str, LIMITS[name]))}")
    if choice["rows"] != facts.get(TILE_ROWS, choice["rows"]):
        raise ValueError(f"rows is {choice['rows']}, and the key has tiles of {facts[TILE_ROWS]} rows")
    if choice.get("residents"):
        _check_hopper(facts["weight"], choice)


def _check_hopper(kind: str, choice: Choice) -> None:
    groups, residents = SPECIALIZED[int(choice["rows"])]
    for name, wanted in (
        ("outputs", 64 * groups),
        ("warps", 4 * groups),
        ("residents", residents),
        ("inputs", HOPPER[kind]),
    ):
        if choice[name] != wanted:
            of_rows = "" if name == "inputs" else f" of {choice['rows']} rows"
            raise ValueError(f"{name} is {choice[name]}; a tile{of_rows} of the kernel for Hopper has {wanted}")


def fits(rows: int, sorts: bool) -> bool:
    """Whether tiles may have so many rows. `sorts`: whether pairs are sorted; if not, each pair is a tile."""
    return LEAST_ROWS <= rows <= MOST_ROWS and (sorts or rows == LEAST_ROWS)


def divides(tile: ExpertTile, group: int) -> bool:
    """Whether all inputs of a block have one scale. `group`: inputs that share one; 0 = all. Ranks whose first channel
    is inside a group of the checkpoint have smaller groups than others, and so may other models."""
    return not group or group % tile.inputs == 0
