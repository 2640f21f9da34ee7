"""scheduler=fcfs: prompts in chunks or whole. A step has 16 tokens."""

from dovetail.plugins.scheduler.config import FCFSConfig
from dovetail.plugins.scheduler.fcfs import FCFSScheduler


def chunks(bench, lengths, *, chunked):
    """Return the chunks of each prompt, in order of arrival."""
    b = bench(FCFSScheduler, FCFSConfig(chunked=chunked), max_seqs=4, budget=16)
    uids = [b.add([10 * i + length] * length, 4).uid for i, length in enumerate(lengths)]
    b.run()
    rows = [row for plan in b.engine.executor.plans for row in plan.rows]
    assert b.entries == uids, "order of arrival"
    return [[r.count for r in rows if r.uid == uid and r.bound <= n] for uid, n in zip(uids, lengths, strict=True)]


def test_a_chunk_fills_the_step(bench):
    assert chunks(bench, (10, 10, 3), chunked=True) == [[10], [6, 4], [3]]


def test_a_whole_prompt_waits_for_a_step_with_room(bench):
    assert chunks(bench, (10, 10, 3, 16), chunked=False) == [[10], [10], [3], [16]]


def test_a_prompt_longer_than_a_step_is_split_anyway(bench):
    assert chunks(bench, (20, 5), chunked=False) == [[16, 4], [5]]
