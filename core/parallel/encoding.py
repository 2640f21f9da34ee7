"""Encoding of plans, join blobs and late inputs as bytes: versioned and checked, without pickle. Decoding returns
exactly what was encoded or raises ValueError.

    plan = magic 4s | version u16 | 0 u16 | crc32 u32 of the rest | 0 u32 | int64 ...
           int64: step, lane, state, follows, then the nine counts of _COUNTS, then the sections in that order, row
           by row
    blob = magic 4s | version u16 | 0 u16 | crc32 u32 of the rest | JSON bytes u32 | int32 token ids ... | JSON
    late = magic 4s | version u16 | 0 u16 | crc32 u32 of the int64s | rows u32
           | int64 step, words, row ..., drafts of each row ... | uint32 mask words, row by row ...
           Masks are megabytes per step in a large batch, so only their number is checked.

Everything is little-endian. Any change of the layout, or of a record's fields, raises VERSION.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sized
from itertools import chain, repeat
from operator import mul
from typing import Any

import numpy as np

from dovetail.core.interfaces import (
    CatchUp,
    HostDraft,
    Join,
    JoinBlob,
    LateInputs,
    PageDelta,
    PageOp,
    Request,
    Row,
    SamplingParams,
    StepPlan,
    StepShape,
)

VERSION = 10
PLAN_MAGIC, BLOB_MAGIC, LATE_MAGIC = b"DVTP", b"DVTB", b"DVTL"

_PREFIX = struct.Struct("<4sHHII")
_FIRST = ("step", "lane", "state", "follows")
_COUNTS = ("rows", "joins", "leaves", "pages", "ops", "drafts", "draft tokens", "shapes", "catch-ups")
_RECORDS = Row, Join, PageDelta, PageOp, StepShape, CatchUp
_ROW, _JOIN, _PAGE, _OP, _SHAPE, _CATCH_UP = (len(record._fields) for record in _RECORDS)
_WIDTHS = (_ROW, _JOIN, 1, _PAGE, _OP, 2, 1, _SHAPE, _CATCH_UP)
_HEAD = len(_FIRST) + len(_COUNTS)
_flatten = chain.from_iterable


def encode_plan(plan: StepPlan, state: int = 0) -> bytes:
    """Encode a plan. `state`: the sender's SlotLedger.digest (int64) before it, which receivers compare with theirs."""
    rows, joins, leaves, pages, ops, drafts = plan.rows, plan.joins, plan.leaves, plan.pages, plan.ops, plan.drafts
    heads: list[tuple[int, int]] = [(draft.slot, len(draft.tokens)) for draft in drafts]
    draft_tokens = [token for draft in drafts for token in draft.tokens]
    shape = [] if plan.shape is None else [plan.shape]
    sized: tuple[Sized, ...] = rows, joins, leaves, pages, ops, drafts, draft_tokens, shape, plan.catch_up
    counts = tuple(map(len, sized))
    first = (plan.step, plan.lane, state, int(plan.follows))
    size = _HEAD + sum(map(mul, counts, _WIDTHS))
    records = (*heads, draft_tokens, *shape, *plan.catch_up)
    numbers = _flatten((first, counts, *rows, *joins, leaves, *pages, *ops, *records))
    try:
        body = struct.pack(f"<{size}q", *numbers)
    except struct.error as error:
        raise ValueError(f"step {plan.step}: a plan holds integers in [-2**63, 2**63) only: {error}") from error
    return _PREFIX.pack(PLAN_MAGIC, VERSION, 0, zlib.crc32(body), 0) + body


def decode_plan(data: bytes | memoryview) -> tuple[StepPlan, int]:
    """Return the plan and the sender's state digest. Raises ValueError for anything that encode_plan did not write."""
    body, spare = _open(data, PLAN_MAGIC, "plan")
    if spare or len(body) % 8 or len(body) < 8 * _HEAD:
        raise ValueError(f"a plan of {len(body)} bytes after its prefix is not whole: it has at least {_HEAD} int64")
    step, lane, state, follows, *counts = struct.unpack_from(f"<{_HEAD}q", body)
    size = _HEAD + sum(map(mul, counts, _WIDTHS))
    if min(counts) < 0 or 8 * size != len(body):
        named = ", ".join(f"{count} {name}" for name, count in zip(_COUNTS, counts, strict=True))
        raise ValueError(f"a plan of {named} has {size} int64, and this one has {len(body) // 8}")

    if follows not in (0, 1):
        raise ValueError(f"a plan's `follows` is 0 or 1, and this one has {follows}")
    at = 8 * _HEAD
    sections: list[Iterator[tuple[int, ...]]] = []
    for count, width in zip(counts, _WIDTHS, strict=True):
        end = at + 8 * width * count
        sections.append(struct.iter_unpack(f"<{width}q", body[at:end]))
        at = end
    rows, joins, leaves, pages, ops, drafts, tokens, shapes, catch_up = sections
    plan = StepPlan(
        step=step,
        rows=_records(Row, rows),
        joins=_records(Join, joins),
        leaves=[slot for (slot,) in leaves],
        pages=_records(PageDelta, pages),
        ops=_records(PageOp, ops),
        drafts=_drafts(list(drafts), [token for (token,) in tokens]),
        lane=lane,
        follows=bool(follows),
        catch_up=_records(CatchUp, catch_up),
        shape=_shape(_records(StepShape, shapes)),
    )
    return plan, state


def _records(kind: Any, section: Iterable[tuple[int, ...]]) -> list[Any]:
    # tuple.__new__ skips the Python frame that NamedTuple's constructor costs for each record.
    return list(map(tuple.__new__, repeat(kind), section))


def _shape(found: list[StepShape]) -> StepShape | None:
    if len(found) > 1:
        raise ValueError(f"a plan has one shape or none, and this one has {len(found)}")
    return found[0] if found else None


def _drafts(heads: list[tuple[int, ...]], tokens: list[int]) -> list[HostDraft]:
    if any(count < 0 for _, count in heads) or sum(count for _, count in heads) != len(tokens):
        raise ValueError(f"host drafts of lengths {[n for _, n in heads]} do not use up {len(tokens)} draft tokens")
    drafts, at = [], 0
    for slot, count in heads:
        drafts.append(HostDraft(slot, tuple(tokens[at : at + count])))
        at += count
    return drafts


_REQUEST_FIELDS = (
    "uid",
    "eos_ids",
    "arrival",
    "priority",
    "deadline",
    "user",
    "cache_salt",
    "hints",
    "adapter",
    "processors",
    "pooling",
)
"""Fields of Request in wire order. The prompt and the parameters are encoded separately."""
assert {*_REQUEST_FIELDS, "prompt_ids", "params"} == {f.name for f in dataclasses.fields(Request) if f.init}


def encode_blob(uid: int, epoch: int, blob: JoinBlob) -> bytes:
    """Encode the data of one join. The known tokens begin with the prompt, so only the prompt's length is added."""
    request = blob.request
    prompt = len(request.prompt_ids)
    if blob.tokens[:prompt] != request.prompt_ids:
        raise ValueError(f"uid {uid}: the known tokens of a sequence begin with its prompt, and these do not")
    fields = {name: getattr(request, name) for name in _REQUEST_FIELDS} | {"hints": dict(request.hints)}
    header = {
        "uid": uid,
        "epoch": epoch,
        "sample": blob.sample,
        "adapter": blob.adapter,
        "prompt": prompt,
        "request": fields,
        "params": request.params.model_dump(mode="json", exclude_defaults=True),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    try:
        ids = array("i", blob.tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"uid {uid}: token ids are integers in [0, 2**31): {error}") from error
    if sys.byteorder == "big":
        ids.byteswap()
    body = ids.tobytes() + text
    crc = zlib.crc32(body, len(text))
    return _PREFIX.pack(BLOB_MAGIC, VERSION, 0, crc, len(text)) + body


def decode_blob(data: bytes | memoryview) -> tuple[int, int, JoinBlob]:
    """Return uid, epoch and the blob. Raises ValueError for anything that encode_blob did not write."""
    body, text_bytes = _open(data, BLOB_MAGIC, "blob")
    if text_bytes > len(body) or (len(body) - text_bytes) % 4:
        raise ValueError(f"a blob of {len(body)} bytes after its prefix cannot end in {text_bytes} bytes of JSON")
    split = len(body) - text_bytes
    ids = array("i", bytes(body[:split]))
    if sys.byteorder == "big":
        ids.byteswap()
    tokens = tuple(ids)
    try:
        header = json.loads(bytes(body[split:]))
        fields = header["request"]
        fields |= {name: tuple(fields[name]) for name in ("eos_ids", "processors")}
        params = SamplingParams.model_validate(header["params"])
        request = Request(prompt_ids=tokens[: header["prompt"]], params=params, **fields)
        return header["uid"], header["epoch"], JoinBlob(tokens, request, header["sample"], header["adapter"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a blob's header does not fit this build: {type(error).__name__}: {error}") from error


def encode_late(late: LateInputs) -> bytes:
    words, drafts = late.masks_MW.shape[1], late.drafts or (0,) * len(late.rows)
    head = struct.pack(f"<{2 + 2 * len(late.rows)}q", late.step, words, *late.rows, *drafts)
    prefix = _PREFIX.pack(LATE_MAGIC, VERSION, 0, zlib.crc32(head, len(late.rows)), len(late.rows))
    return prefix + head + late.masks_MW.astype("<u4", copy=False).tobytes()


def decode_late(data: bytes | memoryview) -> LateInputs:
    """Return the late inputs. Raises ValueError for anything that encode_late did not write."""
    body, crc, rows = _prefix(data, LATE_MAGIC, "late input")
    size = 8 * (2 + 2 * rows)
    if len(body) < size or zlib.crc32(body[:size], rows) != crc:
        raise _altered("late input", data)
    step, words, *listed = struct.unpack_from(f"<{2 + 2 * rows}q", body)
    indices, drafts = tuple(listed[:rows]), tuple(listed[rows:])
    count = rows + sum(drafts)
    if min(drafts, default=0) < 0 or words < 0 or len(body) - size != 4 * count * words:
        raise ValueError(f"step {step}: {len(body) - size} bytes of masks are not {count} masks of {words} words")
    masks = np.frombuffer(body, "<u4", count * words, size).astype(np.uint32).reshape(count, words)
    return LateInputs(step, indices, masks, drafts if any(drafts) else ())


def _open(data: bytes | memoryview, magic: bytes, what: str) -> tuple[memoryview, int]:
    """Check the prefix and the check sum. Return the body and the prefix's last number."""
    body, crc, number = _prefix(data, magic, what)
    if zlib.crc32(body, number) != crc:
        raise _altered(what, data)
    return body, number


def _altered(what: str, data: bytes | memoryview) -> ValueError:
    return ValueError(f"this {what} of {len(data)} bytes was altered or cut short on its way (CRC-32 differs)")


def _prefix(data: bytes | memoryview, magic: bytes, what: str) -> tuple[memoryview, int, int]:
    """Return the bytes after the prefix, the check sum in the prefix, and its last number."""
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        raise ValueError(f"{len(view)} bytes are too few for a {what}: its prefix alone has {_PREFIX.size}")
    found, version, spare, crc, number = _PREFIX.unpack_from(view)
    if found != magic:
        raise ValueError(f"this is not a {what}: it begins with {found!r}, not {magic!r}")
    if version != VERSION:
        raise ValueError(
            f"{what} encoding {version} differs from this build's {VERSION}: run one version on every rank"
        )
    if spare:
        raise _altered(what, data)
    return view[_PREFIX.size :], crc, number
