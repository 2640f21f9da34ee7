"""Recordings: replayed to the bit, cut off anywhere, damaged, without text, and beside an engine that goes on."""

from __future__ import annotations

import errno
import itertools
import random
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.core.compose import EngineConfig, compose, installed
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.errors import ConfigError
from dovetail.core.frontend.replicas import replica_compositions
from dovetail.core.interfaces import KVGroup, SamplingParams
from dovetail.core.recording import file
from dovetail.core.recording.pseudonyms import Pseudonyms
from dovetail.core.recording.recorder import recording_path
from dovetail.core.recording.recording import Recording
from dovetail.core.testing.reference import build
from dovetail.core.testing.scheduler import ADAPTERS, PAGE, SchedulerContract, random_load
from dovetail.core.testing.toy import ToyComposition, ToyDevice
from dovetail.plugins.app.replay.lockstep import Lockstep
from dovetail.plugins.app.replay.parts import Parts

from .record import ALLOCATORS, PAIRS, SCHEDULERS, STORED, run, small_engine


def parts_of(recording: Recording, scheduler: str, allocator: str) -> Parts:
    groups, pages, limits = recording.groups, dict(recording.header.num_pages), recording.limits
    kv = build("kv_cache", allocator, groups=groups, num_pages=pages)
    made = build("scheduler", scheduler, limits=limits, kv=kv)
    if recording.header.adapter_slots:
        from dovetail.core.engine.adapters import AdapterSlots

        made.resources = (AdapterSlots(recording.header.adapter_slots),)
    return Parts(kv, made, limits, seed=0)


@pytest.mark.parametrize(("scheduler", "allocator"), PAIRS)
def test_stored_recordings_are_replayed_to_the_bit(scheduler: str, allocator: str) -> None:
    """After an intended change of a policy or an allocator, run record.py."""
    recording = Recording(str(STORED / f"{scheduler}-{allocator}.rec"), "replay.path")
    assert len(recording.plans) > 50 and sum(life.cached for life in recording.lives) > 0
    assert Lockstep(recording, parts_of(recording, scheduler, allocator)).run() is None


@pytest.mark.parametrize(("kind", "names"), [("scheduler", SCHEDULERS), ("kv_cache", ALLOCATORS)])
def test_every_built_in_part_has_a_recording(kind: str, names: tuple[str, ...]) -> None:
    built_in = (installed().get(kind, name) for name in installed().options(kind))
    assert sorted(one.component.name for one in built_in if one.package.name == "dovetail") == sorted(names)


def test_another_policy_differs_and_both_states_are_known() -> None:
    recording = Recording(str(STORED / "fcfs-prefix_hash.rec"), "replay.path")
    found = Lockstep(recording, parts_of(recording, "shortest_job", "prefix_hash")).run()
    assert found is not None and 0 < found.step < len(recording.plans)
    before = Lockstep(recording, parts_of(recording, "fcfs", "prefix_hash")).run(until=found.step)
    assert before is not None and before.differences == [] and found.replayed.keys() == before.replayed.keys()
    plan = next(plan for plan in recording.plans if plan.step == found.step)
    assert (before.replayed["waiting"], before.replayed["running"]) == (plan.waiting, plan.running)


class Driver(SchedulerContract):
    """Runs loads on an engine that records."""

    def recorded(self, path: Path, load: list[Any], depth: int, lookahead: int, slots: int, *, tokens: bool) -> None:
        groups = [KVGroup(0, (0,), page_tokens=PAGE), KVGroup(1, (1,), page_tokens=2 * PAGE)]
        groups.append(KVGroup(2, (2,), kind="window", window=7, page_tokens=PAGE))
        sizes = {"max_seqs": 6, "max_len": 64, "lookahead": lookahead}
        device = ToyDevice(groups, {0: 20, 1: 10, 2: 40}, delay=depth - 1, adapter_slots=slots, **sizes)
        config = EngineConfig(
            token_budget=16, max_seqs=6, max_len=64, depth=depth, mask_wait=1.0, record=str(path), record_tokens=tokens
        )
        made = ToyComposition(
            lambda limits, kv: build("scheduler", "priority", limits=limits, kv=kv),
            lambda groups, pages: build("kv_cache", "radix", groups=groups, num_pages=pages),
            device,
            config,
        )
        engine = start_engine(made)  # type: ignore[arg-type]
        engine.clock = partial(next, itertools.count(0.0))
        for name in ADAPTERS if slots else "":
            engine.load_adapter(name, f"/adapters/{name}").result()
        self.run(engine, load)
        engine.shutdown()


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("tokens", [False, True])
def test_every_kind_of_request_is_replayed(tmp_path: Path, depth: int, tokens: bool) -> None:
    """Drafts, masks that are late, adapters, samples, aborts, sliding windows and preemption."""
    preemptions = 0
    for seed, lookahead, slots in ((0, 0, 0), (1, 3, 0), (2, 0, 2)):
        load = random_load(seed, grammars=True, adapters=ADAPTERS if slots else "")
        path = tmp_path / f"{seed}.rec"
        Driver().recorded(path, load, depth, lookahead, slots, tokens=tokens)
        recording = Recording(str(path), "replay.path")
        assert Lockstep(recording, parts_of(recording, "priority", "radix")).run() is None
        preemptions += sum(life.preemptions for life in recording.lives)
        assert any(result.drafted for result in recording.results) == bool(lookahead)
    assert preemptions > 0


def test_a_uid_may_be_used_again(tmp_path: Path) -> None:
    """The first request of a server has the number of its warm-up, which has ended."""
    engine = small_engine(f"engine.record={tmp_path}/run.rec")
    for prompt in ([1, 2, 3], [4, 5]):
        engine.add(prompt, SamplingParams(max_tokens=3, ignore_eos=True), number=0)
        while engine.has_work:
            engine.step()
    engine.shutdown()
    recording = Recording(f"{tmp_path}/run.rec", "replay.path")
    assert [(life.added.uid, len(life.request.prompt) // 4, life.output) for life in recording.lives] == [
        (0, 3, 3),
        (0, 2, 3),
    ]
    assert Lockstep(recording, parts_of(recording, "fcfs", "prefix_hash")).run() is None


# The file.


def test_a_recording_may_be_cut_off_anywhere(tmp_path: Path) -> None:
    path, whole = tmp_path / "run.rec", (STORED / "fcfs-radix.rec").read_bytes()
    kept = []
    for size in sorted(random.Random(0).sample(range(len(whole)), 40)) + [len(whole)]:
        path.write_bytes(whole[:size])
        try:
            recording = Recording(str(path), "replay.path")
        except ConfigError as error:
            assert "cut off" in str(error) or "no request" in str(error)
            kept.append(0)
            continue
        kept.append(len(recording.plans))
        assert Lockstep(recording, parts_of(recording, "fcfs", "radix")).run() is None
    assert kept == sorted(kept) and kept[-1] > 50


def test_entries_arrive_in_frames_while_the_engine_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses the last frame at most."""
    monkeypatch.setattr(file, "FRAME_SECONDS", 0.0)
    monkeypatch.setattr(file, "ENCODE_SECONDS", 0.001)
    path = tmp_path / "run.rec"
    engine = small_engine(f"engine.record={path}")
    engine.add([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    while engine.has_work:
        engine.step()
    deadline = time.monotonic() + 60
    while len(plans_of(path)) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(plans_of(path)) == 8
    engine.shutdown()


def plans_of(path: Path) -> Any:
    try:
        return Recording(str(path), "replay.path").plans
    except ConfigError:
        return ()


DAMAGES: list[tuple[str, Any]] = [
    ("it is no recording", lambda data: b"PK" + data),
    ("it was cut off before its header", lambda data: data[:10]),
    ("it was cut off within its header", lambda data: data[:100]),
    ("format 99; this version of Dovetail reads formats 1 and 2", lambda data: data.replace(b" 1\n", b" 99\n", 1)),
    ("the checksum of a frame is wrong", lambda data: data[:400] + bytes([data[400] ^ 1]) + data[401:]),
    ("cannot be read", None),
]


@pytest.mark.parametrize(("says", "damage"), DAMAGES, ids=[says for says, _ in DAMAGES])
def test_other_files_are_refused_in_one_line(tmp_path: Path, says: str, damage: Any) -> None:
    path = tmp_path / "run.rec"
    if damage is not None:
        path.write_bytes(damage((STORED / "fcfs-radix.rec").read_bytes()))
    with pytest.raises(ConfigError, match=f"replay.path=.*{says}") as raised:
        Recording(str(path), "replay.path")
    assert len(str(raised.value).splitlines()) == 1


def test_entries_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    import msgspec

    path, encode = tmp_path / "run.rec", msgspec.msgpack.Encoder().encode
    whole = Recording(str(STORED / "fcfs-radix.rec"), "replay.path")
    for kept in ("Planned", "Resulted", "Ended", "Added"):
        writer = file.FrameWriter(path, encode(whole.header))
        for event in whole.events:
            if type(event).__name__ in (kept, "Arrived" if kept == "Planned" else kept):
                writer.put(encode, event)
        writer.close()
        with pytest.raises(ConfigError, match="it is damaged"):
            Recording(str(path), "replay.path")
        path.unlink()


def test_entries_of_any_content_are_read_or_refused(tmp_path: Path) -> None:
    """The checksums are right, so that only the entries themselves can be wrong."""
    path, rng = tmp_path / "run.rec", random.Random(0)
    frames = [bytearray(body) for body in file.read_frames(STORED / "fcfs-radix.rec", "replay.path")]
    refused = 0
    for _ in range(150):
        bodies = [bytearray(body) for body in frames]
        for _ in range(rng.randrange(1, 4)):
            body = rng.choice(bodies)
            body[rng.randrange(len(body))] = rng.randrange(256)
        packed = (file._FRAME.pack(len(body), zlib.crc32(body), 0) + body for body in bodies)
        path.write_bytes(file.MAGIC + b"1\n" + b"".join(packed))
        try:
            recording = Recording(str(path), "replay.path")
            for life in recording.lives:
                recording.request(life.request)
        except ConfigError:
            refused += 1
    assert 30 < refused < 150


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    path.write_text("mine")
    made = compose([f"engine.record={path}", "executor=simulated"], app="generate")
    with pytest.raises(ConfigError, match="the file exists, and nothing is overwritten"):
        start_engine(made)
    with pytest.raises(ConfigError, match="there is no folder"):
        start_engine(compose([f"engine.record={tmp_path}/none/run.rec", "executor=simulated"], app="generate"))
    assert path.read_text() == "mine"
    assert recording_path(made, again=True) == tmp_path / "run-2.rec", "a restarted engine writes beside it"


def test_a_device_keeps_nothing_and_serves_every_engine() -> None:
    """Its cost can so be measured by an ablation, which starts engines again and again."""
    run(small_engine("engine.record=/dev/null"))
    made = compose(["engine.record=/dev/null", "engine.dp=2", "executor=simulated"], app="generate")
    assert [one.engine.record for one in replica_compositions(made)] == ["/dev/null"] * 2
    assert recording_path(made, again=True) == Path("/dev/null")


def test_each_replica_has_a_file() -> None:
    made = compose(["engine.record=a b.rec", "engine.dp=2", "executor=simulated"], app="generate")
    assert [one.engine.record for one in replica_compositions(made)] == ["a b.0.rec", "a b.1.rec"]


def test_an_engine_goes_on_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file, "zstd", lambda: None)
    engine = small_engine(f"engine.record={tmp_path}/run.rec")
    recorder: Any = engine._recorder

    class Full:
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            """Nothing."""

    recorder._file._file.close()
    recorder._file._file = Full()
    run(engine)
    assert "recording ended (No space left on device)" in caplog.text


def test_a_compressed_recording_is_smaller_and_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zstandard")
    run(small_engine(f"engine.record={tmp_path}/a.rec"))
    monkeypatch.setattr(file, "zstd", lambda: None)
    with pytest.raises(ConfigError, match=r"pip install 'dovetail\[record\]'"):
        Recording(f"{tmp_path}/a.rec", "replay.path")
    run(small_engine(f"engine.record={tmp_path}/b.rec"))
    monkeypatch.undo()
    packed, plain = (Recording(f"{tmp_path}/{name}.rec", "replay.path") for name in "ab")
    assert (tmp_path / "a.rec").stat().st_size < 0.7 * (tmp_path / "b.rec").stat().st_size
    assert [plan.rows for plan in packed.plans] == [plan.rows for plan in plain.plans]


# No text.


def test_pseudonyms_are_equal_as_far_as_prompts_are() -> None:
    made, rng = Pseudonyms(50), random.Random(0)
    prompts = [rng.choices(range(3), k=rng.randrange(1, 40)) for _ in range(60)]
    hidden = [made.prompt(prompt)[0].tolist() for prompt in prompts]
    for (a, x), (b, y) in itertools.combinations(zip(prompts, hidden, strict=True), 2):
        same = next((i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), min(len(a), len(b)))
        assert x[:same] == y[:same] and not {*x[same:]} & {*y[same:]}
    other = Pseudonyms(50)
    assert other.prompt(prompts[0])[0].tolist() != hidden[0], "each recording has its own secrets"
    assert made.salt("a") != made.salt("b") and made.salt("") == ""


def test_tokens_that_follow_a_prompt_have_the_pseudonyms_of_a_longer_prompt() -> None:
    made, rng = Pseudonyms(50), random.Random(1)
    prompts = [rng.choices(range(50), k=rng.randrange(1, 9)) for _ in range(200)]
    outputs = [rng.choices(range(50), k=7) for _ in prompts]
    for uid, prompt in enumerate(prompts):
        made.add(uid, made.prompt(prompt)[1])
    found = np.stack(
        [made.follow(made.places(range(200)), np.array([out[i] for out in outputs])) for i in range(7)], axis=1
    ).tolist()
    for prompt, output, ids in zip(prompts, outputs, found, strict=True):
        assert made.prompt(prompt + output)[0].tolist()[len(prompt) :] == ids
    made.drop(3)
    assert made.places([2, 3])[1] is None


def test_a_recording_has_text_only_if_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "zstd", lambda: None)
    ids = [101, 102, 103, 104]
    for name, tokens in (("hidden", "false"), ("shown", "true")):
        engine = small_engine(f"engine.record={tmp_path}/{name}.rec", f"engine.record_tokens={tokens}")
        stop = SamplingParams(max_tokens=5, stop=("a secret",), stop_token_ids=(377,), ignore_eos=True, seed=6)
        engine.add(ids, stop)
        while engine.has_work:
            engine.step()
        engine.shutdown()
    texts = {name: (tmp_path / f"{name}.rec").read_bytes() for name in ("hidden", "shown")}
    parts = [np.array(ids, "<i4").tobytes(), b"a secret", b"stop_token_ids"]
    assert [part in texts["shown"] for part in parts] == [True] * 3
    assert [part in texts["hidden"] for part in parts] == [False] * 3


def test_an_engine_without_engine_record_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine: Engine = small_engine()
    run(engine)
    assert list(tmp_path.iterdir()) == []
