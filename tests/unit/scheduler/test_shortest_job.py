"""scheduler=shortest_job: order by the hint, or else by max_tokens."""

import pytest

from dovetail.plugins.scheduler.config import ShortestJobConfig
from dovetail.plugins.scheduler.shortest_job import ShortestJobScheduler


def busy(bench, **config):
    b = bench(ShortestJobScheduler, ShortestJobConfig(**config), max_seqs=1)
    b.add([49], 8)
    b.step()
    return b


def test_by_prompt_and_expected_output(bench):
    b = busy(bench, max_wait=1e6)
    long_prompt = b.add([1] * 20, 4).uid
    long_output = b.add([2, 2], 30).uid
    short = b.add([3, 3], 6).uid
    hinted = b.add([4, 4], 30, hints={"output_tokens": 2}).uid
    b.run()
    assert b.entries[1:] == [hinted, short, long_prompt, long_output]


def test_a_hint_beyond_max_tokens_counts_as_max_tokens(bench):
    b = busy(bench, max_wait=1e6)
    capped = b.add([4, 4], 3, hints={"output_tokens": 500}).uid
    other = b.add([3, 3], 6).uid
    b.run()
    assert b.entries[1:] == [capped, other]


@pytest.mark.parametrize(("max_wait", "enters"), [(20, True), (1e6, False)])
def test_a_long_one_does_not_starve(bench, max_wait, enters):
    b = busy(bench, max_wait=max_wait)
    long = b.add([2, 2], 30).uid
    for i in range(60):
        b.add([7, i % 50], 2)
        b.step()
    assert (long in b.entries) is enters
    b.run()
