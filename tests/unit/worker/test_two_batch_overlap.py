"""Two-batch overlap: position of the cut, order of halves and their collective calls, lifetime of a call's memory."""

from __future__ import annotations

import random
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail import LLM, CapabilityError, Component, Config
from dovetail.core.compose import compose, installed
from dovetail.core.compose.registry import Package, Registered, Registry
from dovetail.core.interfaces import AttentionBackend, AttnCtx, ForwardContext, HostBounds, KVGroup, Model
from dovetail.core.testing.paging import Paging
from dovetail.core.worker.two_batch_overlap import TILE, SideStream, halve, interleave, middle, why_useless


def bounds(counts: list[int], decodes: int) -> HostBounds:
    return HostBounds(tuple(counts), tuple(counts), decodes)


@pytest.mark.parametrize(
    ("counts", "decodes", "expected"),
    [
        ([4096], 0, 2048),
        ([4100], 0, 2048),
        ([1100], 0, 512),
        ([1023], 0, 511),
        ([10], 0, 5),
        ([1] * 8, 8, 4),
        ([1] * 100 + [1948], 100, 1024),
        ([5, 5, 5], 3, 5),
        ([3, 9, 3], 3, 3),
        ([1, 9], 2, 1),
        ([9], 1, 0),
        ([1], 0, 0),
    ],
)
def test_the_cut_is_in_the_middle_and_never_inside_a_decode_row(counts: list[int], decodes: int, expected: int) -> None:
    assert middle(bounds(counts, decodes)) == expected


def test_large_steps_are_cut_at_a_tile_near_the_middle() -> None:
    for total in range(8 * TILE, 40 * TILE, 37):
        cut = middle(bounds([total // 3, total - total // 3], 0))
        assert cut % TILE == 0 and abs(cut - total / 2) <= TILE / 2 + 1, (total, cut)


class Keeps(AttentionBackend):
    """Plans nothing."""

    def attend(self, *args: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("seed", range(40))
def test_a_half_has_the_metadata_of_a_step_with_its_tokens(seed: int) -> None:
    drawn = random.Random(seed)
    groups = (KVGroup(0, (0, 2), page_tokens=4), KVGroup(3, (1,), page_tokens=4, kind="window", window=8))
    decodes, width = drawn.randint(0, 3), drawn.randint(1, 3)
    named = [(f"d{i}", width) for i in range(decodes)]
    named += [(f"c{i}", drawn.randint(1, 9)) for i in range(drawn.randint(1, 3))]
    before = [(name, drawn.randint(1, 9)) for name, _ in named if drawn.random() < 0.7]

    def paging() -> Paging:
        """Return a paging with the same pages each time."""
        made = Paging(groups, torch.device("cpu"), rng=random.Random(seed))
        for name, count in before:
            made.step([(name, count)])
        for name, count in named:
            made.slots.setdefault(name, 2 * len(made.slots) + 1)
            for group in groups:
                made.table(group, name, made.lengths.get(name, 0) + count)
        return made

    step = paging().step(named, num_decode=decodes)
    cut = middle(step.host)
    first, second, left = [], [], cut
    for name, count in named:
        here = min(count, left)
        left -= here
        first += [(name, here)] if here else []
        second += [(name, count - here)] if here < count else []
    if not first:
        assert named == [("c0", 1)]
        return
    live_T = torch.rand(len(step.positions_T)) < 0.5
    ctx = ForwardContext(step.positions_T, {id: AttnCtx(meta, step.host) for id, meta in step.metas.items()}, live_T)
    alone, halves = paging(), halve(ctx, cut, Keeps(None))
    assert torch.equal(torch.cat([half.live_T for half in halves]), live_T)
    for half, rows in zip(halves, (first, second), strict=True):
        expected = alone.step(rows, num_decode=sum(name.startswith("d") for name, _ in rows))
        assert torch.equal(half.positions_T, expected.positions_T)
        for id, meta in expected.metas.items():
            got = half.attn[id]
            assert got.host == expected.host
            for field in ("row_start_B1", "kv_len_B", "slots_B", "positions_T", "rows_T", "write_T"):
                one, other = getattr(got.meta, field), getattr(meta, field)
                assert one.dtype == other.dtype and torch.equal(one, other), field
            for row, (name, _) in enumerate(rows):
                pages = -(-alone.lengths[name] // 4)
                assert torch.equal(got.meta.page_table_BP[row, :pages], meta.page_table_BP[row, :pages])


class FakeStream:
    """Logs what is enqueued on it."""

    device = torch.device("cpu")

    def __init__(self, name: str, log: list[str], reads: list[weakref.ref[torch.Tensor]]) -> None:
        self.name, self.log, self.reads = name, log, reads

    def wait_event(self, event: FakeEvent) -> None:
        if event.of.name == "main":
            assert event.at == len([line for line in self.log if line.startswith("main:")]), "not all of main"
            self.log.append(f"{self.name} waits for all of main")
        else:
            self.log.append(f"{self.name} waits for call {event.calls}")
            read = self.reads[event.calls - 1]()
            assert read is not None, f"memory that call {event.calls} reads is free before it has run"


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.of, self.calls = stream, len(stream.reads)
        self.at = len([line for line in stream.log if line.startswith("main:")])
        if stream.name == "side":
            stream.log.append("side records")


def two_streams(main: FakeStream, side: FakeStream, monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """Replace torch's streams. Return those that became current, in order."""
    current = [main]
    fake = SimpleNamespace(
        Stream=lambda device, priority: side,
        Event=FakeEvent,
        current_stream=lambda device: current[-1],
        set_stream=lambda stream: current.append(stream),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    return current


def test_halves_take_turns_on_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also, the inputs of a call are free once main has waited for it."""
    log: list[str] = []
    reads: list[weakref.ref[torch.Tensor]] = []
    main, side = FakeStream("main", log, reads), FakeStream("side", log, reads)
    current = two_streams(main, side, monkeypatch)

    def call(name: str, x: torch.Tensor) -> int:
        log.append(f"{current[-1].name}: {name} calls")
        reads.append(weakref.ref(x))
        return len(reads)

    def layers(name: str) -> Any:
        for _ in range(2):
            log.append(f"{current[-1].name}: {name} works")
            made = yield partial(call, name, torch.zeros(3))
            assert reads[made - 1]() is None
        return name

    entered: list[int] = []
    assert interleave([layers("A"), layers("B")], SideStream(torch.device("cpu")), entered.append) == ("A", "B")
    assert entered == [0, 1] * 3
    turn = ["main: {0} works", "side waits for all of main", "side: {0} calls", "side records"]
    expected = [line.format(name) for name in "AB" for line in turn]
    for made, name in ((1, "A"), (2, "B")):
        expected += [f"main waits for call {made}", *(line.format(name) for line in turn)]
    assert log == [*expected, "main waits for call 3", "main waits for call 4"]
    assert current[-1] is main


def test_a_call_that_fails_leaves_the_main_stream_current(monkeypatch: pytest.MonkeyPatch) -> None:
    main, side = FakeStream("main", [], []), FakeStream("side", [], [])
    current = two_streams(main, side, monkeypatch)

    def fails() -> None:
        assert current[-1] is side
        raise ValueError("no sum")

    def layers() -> Any:
        yield fails

    with pytest.raises(ValueError, match="no sum"):
        interleave([layers()], SideStream(torch.device("cpu")))
    assert current[-1] is main


# Which compositions support it.


class WholeConfig(Config):
    """None."""


class Whole(Model):
    """Without `layers`."""

    @classmethod
    def spec(cls, config: Any) -> Any:
        return compose(["model=tiny"]).target("model").spec(compose(["model=tiny"]).part("model").config)

    @classmethod
    def source(cls, config: Any) -> Any:
        raise NotImplementedError

    kv_groups = load = init_dummy = embed = forward = logits = None  # type: ignore[assignment]


def test_a_model_without_layers_is_refused() -> None:
    part = Component(kind="model", name="whole", config=WholeConfig, target=f"{__name__}:Whole", api="model/0.4")
    own = installed()
    registry = Registry(
        [*own.registered.values(), Registered(part, Package("acme", "1.0"))], own.problems, own.config_dirs
    )
    words = ["model=whole", "engine.device=cpu", "engine.overlap_tokens=64"]
    with pytest.raises(CapabilityError, match=r"model=whole makes its collective calls by itself.*overlap_tokens=0"):
        LLM(composition=compose(words, registry=registry))


def test_a_backend_that_plans_on_the_host_is_refused() -> None:
    from dovetail.core.compose.capabilities import Host

    composition = compose(["model=tiny", "attention=flashinfer", "engine.overlap_tokens=64"])
    with pytest.raises(CapabilityError, match=r"flashinfer requires engine with overlap_tokens 0.*overlap_tokens=0"):
        composition.check(Host(device="cuda"), {})


def test_a_note_says_if_overlap_gains_nothing() -> None:
    assert why_useless(2048, 2048, 2) is None
    for tokens, why in ((32, "no sums to hide"), (4096, "engine.token_budget=2048")):
        with LLM(
            "tiny", overrides=["engine.device=cpu", "engine.max_len=64", f"engine.overlap_tokens={tokens}"]
        ) as llm:
            notes = llm.engine.info.notes  # type: ignore[attr-defined]
            assert any(f"engine.overlap_tokens={tokens}" in note and why in note for note in notes), notes
