"""scheduler=longest_prefix: cached prefixes first, up to a limit on waiting."""

from dovetail.plugins.scheduler.config import LongestPrefixConfig
from dovetail.plugins.scheduler.longest_prefix import LongestPrefixScheduler

SYSTEM = list(range(1, 25))
"""Three pages of the larger group."""


def after_one(bench, **config):
    """Return a bench with a cached system prompt and its only slot busy for ten steps."""
    b = bench(LongestPrefixScheduler, LongestPrefixConfig(**config), max_seqs=1, pages=100)
    b.add([*SYSTEM, 40], 2)
    b.run()
    b.add([49], 10)
    b.step()
    return b


def test_the_longest_cached_prefix_enters_first(bench):
    b = after_one(bench)
    none, half, all_of_it = (b.add(p).uid for p in ([30] * 20, [*SYSTEM[:9], 3, 3], [*SYSTEM, 4]))
    b.clock.now -= 1000  # No request has waited long.
    b.run()
    assert b.entries[-3:] == [all_of_it, half, none]
    assert b.sequences[all_of_it].cached == 24


def test_a_sequence_that_waited_for_max_wait_goes_first(bench):
    b = after_one(bench, max_wait=6)
    patient = b.add([30] * 20).uid
    b.step(5)
    late = b.add([*SYSTEM, 4]).uid
    b.run()
    assert b.entries[-2:] == [patient, late]


def test_only_the_window_is_compared(bench):
    b = after_one(bench, window=2, max_wait=1e6)
    first, second, cached = (b.add(p).uid for p in ([30] * 5, [31] * 5, [*SYSTEM, 4]))
    b.run()
    assert b.entries[-3:] == [first, cached, second]  # It enters the window when the first leaves.
