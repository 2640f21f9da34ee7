"""Plans and blobs are decoded exactly as encoded, or refused."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.interfaces import (
    CatchUp,
    Grammar,
    HostDraft,
    Join,
    JoinBlob,
    LateInputs,
    PageDelta,
    PageOp,
    PageOpKind,
    Request,
    Row,
    RowFlag,
    SamplingParams,
    StepPlan,
    StepShape,
)
from dovetail.core.parallel.encoding import (
    VERSION,
    decode_blob,
    decode_late,
    decode_plan,
    encode_blob,
    encode_late,
    encode_plan,
)

GOLDEN = Path(__file__).parent

PLAN = StepPlan(
    step=41,
    rows=[
        Row(0, 70_000 << 8, 2, 3, 900, 2, int(RowFlag.SAMPLE | RowFlag.DECODE)),
        Row(5, 2**40 + 1, 1, 128, 128, 0, 0),
    ],
    joins=[Join(5, 2**40 + 1, 1, 64)],
    leaves=[5, 7],
    pages=[PageDelta(0, 5, 0, 11), PageDelta(1, 5, 3, 12)],
    ops=[PageOp(int(PageOpKind.COPY), 0, 3, 11)],
    drafts=[HostDraft(0, (17, 4)), HostDraft(5, ())],
    lane=1,
    follows=False,
    catch_up=[CatchUp(0, 700, 64), CatchUp(5, 0, 2**31)],
    shape=StepShape(200, 2, 1, 3, 900, 1, 0, 64),
)
STATE = 0x0123_4567_89AB_CDEF
BLOB = JoinBlob(
    tokens=(1, 2**31 - 1, 3, 9),
    request=Request(
        uid=70_000,
        prompt_ids=(1, 2**31 - 1, 3),
        params=SamplingParams(
            temperature=0.7,
            seed=2**63 - 1,
            stop=("\n\n", "é"),
            logit_bias={5: -1.5},
            logprobs=0,
            extra={"ngram": 3, "table": {"é": [None, True, 0.5]}},
        ),
        eos_ids=(2, 128_009),
        arrival=12.0625,
        priority=-3,
        deadline=0.1,
        user='Zoë "z"',
        cache_salt="\ud800",
        hints={"expected_output": 321.5},
        processors=("logit_bias", "ngram"),
        adapter="sql@3",
        pooling="mean",
    ),
    sample=1,
    adapter=2,
)

int64 = st.integers(-(2**63), 2**63 - 1)


def records(kind: type, **fields: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(st.builds(kind, **{name: fields.get(name, int64) for name in kind._fields}), max_size=5)


plans = st.builds(
    StepPlan,
    step=int64,
    rows=records(Row),
    joins=records(Join),
    leaves=st.lists(int64, max_size=5),
    pages=records(PageDelta),
    ops=records(PageOp),
    drafts=records(HostDraft, tokens=st.lists(int64, max_size=4).map(tuple)),
    lane=int64,
    catch_up=records(CatchUp),
)
finite = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
sampling = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    max_tokens=st.none() | st.integers(100, 10**6),
    min_tokens=st.integers(0, 100),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    stop_token_ids=token_ids,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 64),
    extra=st.dictionaries(st.text(), json_values, max_size=2),
    grammar=st.none()
    | st.builds(Grammar, kind=st.just("choice"), value=st.lists(st.text(min_size=1), min_size=1, max_size=3).map(tuple))
    | st.builds(Grammar, kind=st.just("json_schema"), value=st.dictionaries(st.text(), st.integers(), max_size=2)),
)


@st.composite
def blobs(draw: st.DrawFn) -> JoinBlob:
    prompt = draw(token_ids)
    request = Request(
        uid=draw(int64),
        prompt_ids=prompt,
        params=draw(sampling),
        eos_ids=draw(token_ids),
        arrival=draw(finite),
        priority=draw(int64),
        deadline=draw(st.none() | finite),
        user=draw(st.text()),
        cache_salt=draw(st.text()),
        hints=draw(st.dictionaries(st.text(), finite, max_size=3)),
        adapter=draw(st.text()),
        processors=draw(st.lists(st.text(), max_size=2).map(tuple)),
    )
    return JoinBlob(prompt + draw(token_ids), request, draw(st.integers(0, 127)), draw(st.integers(-1, 63)))


@given(plans, int64)
def test_plan_round_trip(plan: StepPlan, state: int) -> None:
    decoded, sent_state = decode_plan(encode_plan(plan, state))
    assert (decoded, sent_state) == (plan, state)
    assert [type(row) for row in decoded.rows] == [Row] * len(plan.rows)


@given(int64, int64, blobs())
def test_blob_round_trip(uid: int, epoch: int, blob: JoinBlob) -> None:
    assert decode_blob(encode_blob(uid, epoch, blob)) == (uid, epoch, blob)


@given(int64, st.lists(st.tuples(int64, st.integers(0, 3)), max_size=5), st.integers(0, 4), st.randoms())
def test_late_round_trip(step: int, rows: list[tuple[int, int]], words: int, random: Random) -> None:
    listed, drafts = tuple(row for row, _ in rows), tuple(count for _, count in rows)
    masks_MW = np.array([[random.getrandbits(32)] * words for count in drafts for _ in range(1 + count)], np.uint32)
    masks = masks_MW.reshape(len(rows) + sum(drafts), words)
    data = encode_late(LateInputs(step, listed, masks, drafts))
    decoded = decode_late(data)
    assert (decoded.step, decoded.rows) == (step, listed)
    assert decoded.drafts == (drafts if any(drafts) else ())
    assert decoded.masks_MW.dtype == np.uint32 and np.array_equal(decoded.masks_MW, masks)
    for cut in range(len(data)):
        with pytest.raises(ValueError):
            decode_late(data[:cut])
    with pytest.raises(ValueError, match="late input"):
        decode_late(encode_plan(PLAN))
    head = 16 + 8 * (2 + 2 * len(rows))
    for at in range(4, head):
        with pytest.raises(ValueError):
            decode_late(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / name).read_text())


def test_golden_plan() -> None:
    """Different bytes mean a different format: raise encoding.VERSION and write the file again."""
    data = golden("plan_v10.hex")
    assert encode_plan(PLAN, STATE) == data
    assert decode_plan(data) == (PLAN, STATE)


def test_golden_blob() -> None:
    """Different bytes mean a different format: raise encoding.VERSION and write the file again."""
    data = golden("blob_v10.hex")
    assert encode_blob(70_000 << 8 | 1, 2, BLOB) == data
    assert decode_blob(data) == (70_000 << 8 | 1, 2, BLOB)


MESSAGES = [
    pytest.param(decode_plan, encode_plan(PLAN, STATE), id="plan"),
    pytest.param(decode_blob, encode_blob(1, 2, BLOB), id="blob"),
]


@pytest.mark.parametrize(("decode", "data"), MESSAGES)
def test_every_flipped_bit_is_refused(decode, data: bytes) -> None:
    for bit in range(8 * len(data)):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError):
            decode(bytes(altered))


@pytest.mark.parametrize(("decode", "data"), MESSAGES)
def test_every_truncation_and_extension_is_refused(decode, data: bytes) -> None:
    for length in range(len(data)):
        with pytest.raises(ValueError):
            decode(data[:length])
    with pytest.raises(ValueError):
        decode(data + bytes(8))


@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    for decode in (decode_plan, decode_blob):
        with pytest.raises(ValueError):
            decode(data)


def with_valid_crc(numbers: list[int]) -> bytes:
    """A plan of a faulty or foreign sender: valid check sum, other contents."""
    import zlib

    body = struct.pack(f"<{len(numbers)}q", *numbers)
    return struct.pack("<4sHHII", b"DVTP", VERSION, 0, zlib.crc32(body), 0) + body


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        pytest.param([0] * 12, "not whole", id="shorter than its head"),
        pytest.param([0, 0, 0, 2, *[0] * 9], "`follows` is 0 or 1, and this one has 2", id="neither true nor false"),
        pytest.param([0, 0, 0, 0, 1, *[0] * 8], "1 rows.*20 int64.*has 13", id="rows missing"),
        pytest.param([0, 0, 0, 0, 0, 0, 7, *[0] * 6], "7 leaves.*20 int64.*has 13", id="leaves missing"),
        pytest.param([0, 0, 0, 0, -1, 0, 7, *[0] * 6], "-1 rows", id="counts that cancel out"),
        pytest.param([0, 0, 0, 0, 2**62, *[0] * 8], "has 13", id="a count beyond memory"),
        pytest.param([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 3, 2, 9], "draft tokens", id="draft lengths disagree"),
        pytest.param([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, *[1] * 16], "one shape or none", id="two shapes"),
    ],
)
def test_a_sealed_plan_with_wrong_counts_is_refused(numbers: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_plan(with_valid_crc(numbers))


def test_another_version_is_named() -> None:
    data = bytearray(encode_plan(PLAN))
    data[4] = 1
    with pytest.raises(ValueError, match=f"encoding 1 differs from this build's {VERSION}"):
        decode_plan(bytes(data))


def test_a_blob_is_not_a_plan() -> None:
    with pytest.raises(ValueError, match="not a plan"):
        decode_plan(encode_blob(1, 1, BLOB))


def test_numbers_that_do_not_fit_are_refused_by_the_sender() -> None:
    with pytest.raises(ValueError, match="step 1: .*2\\*\\*63"):
        encode_plan(StepPlan(1, [Row(0, 2**63, 0, 1, 1, 0, 0)]))
    with pytest.raises(ValueError, match="token ids"):
        encode_blob(3, 0, JoinBlob((2**31,), Request(3, (), SamplingParams()), 0))


def test_known_tokens_begin_with_the_prompt() -> None:
    with pytest.raises(ValueError, match="begin with its prompt"):
        encode_blob(3, 0, JoinBlob((1, 2), Request(3, (2,), SamplingParams()), 0))
