"""scheduler=fair: one user's load does not delay other users."""

import pytest

from dovetail.core.interfaces import RequestOptions, SamplingParams
from dovetail.plugins.scheduler.config import FairConfig, FCFSConfig
from dovetail.plugins.scheduler.fair import FairScheduler
from dovetail.plugins.scheduler.fcfs import FCFSScheduler

PROMPT = [1, 2, 3, 4, 5, 6]


def last_of_the_few(b):
    """One user sends 500 requests, then another 5; return the seconds until the last of the five has ended."""
    for _ in range(500):
        b.add(PROMPT, 6, user="flood")
    b.step(20)
    few = [b.add(PROMPT, 6, user="few") for _ in range(5)]
    began = b.clock.now
    b.run()
    return max(b.ended[seq.uid] for seq in few) - began


@pytest.mark.parametrize("depth", [1, 2])
def test_a_flood_does_not_delay_other_users(bench, depth):
    """The few wait for at most the four running requests, and then get every other turn."""
    bound = 60
    options = {"max_seqs": 4, "depth": depth, "delay": depth - 1, "pages": 200}
    assert last_of_the_few(bench(FairScheduler, FairConfig(quantum=12), **options)) < bound
    assert last_of_the_few(bench(FCFSScheduler, FCFSConfig(), **options)) > 5 * bound


def admissions(b, users, entries):
    served = [b.sequences[uid].request.user for uid in b.entries[:entries]]
    return {user: served.count(user) for user in users}


def test_the_quantum_counts_tokens(bench):
    """One user's requests are four times as large, so a quarter as many run."""
    b = bench(FairScheduler, FairConfig(quantum=12), max_seqs=1)
    for _ in range(60):
        b.add([1] * 3, 3, user="small")
        b.add([1] * 12, 12, user="large")
    b.step(400)
    served = admissions(b, ("small", "large"), 50)
    assert served["small"] / served["large"] == pytest.approx(4, rel=0.15)


def test_weights(bench):
    b = bench(FairScheduler, FairConfig(quantum=12, weights={"a": 3.0}), max_seqs=1)
    for _ in range(60):
        b.add(PROMPT, 6, user="a")
        b.add(PROMPT, 6, user="b")
    b.step(400)
    served = admissions(b, ("a", "b"), 48)
    assert served["a"] / served["b"] == pytest.approx(3, rel=0.1)


def test_unused_expected_tokens_are_refunded(bench):
    """Both users expect 40 tokens; requests of one end after one token, so it starts many more."""
    b = bench(FairScheduler, FairConfig(quantum=23), max_seqs=1)
    for _ in range(60):
        brief = b.add([9], 40, user="brief")
        object.__setattr__(brief.request, "stop_ids", frozenset(range(50)))
        b.add([9], 40, user="long")
    b.step(900)
    served = admissions(b, ("brief", "long"), 40)
    assert served["brief"] > 6 * served["long"]


def test_idle_rounds_do_not_accumulate(bench):
    """A user that was idle while another was served does not get all turns afterwards."""
    b = bench(FairScheduler, FairConfig(quantum=12), max_seqs=1)
    for _ in range(80):
        b.add(PROMPT, 6, user="steady")
    b.add(PROMPT, 60, user="guest")  # Long enough to keep the user known throughout.
    b.step(200)
    before = len(b.entries)
    for _ in range(20):
        b.add(PROMPT, 6, user="guest")
    b.run()
    served = [b.sequences[uid].request.user for uid in b.entries[before : before + 20]]
    assert 7 <= served.count("guest") <= 13


def test_a_new_user_starts_in_the_current_round(bench):
    """One user was served while no request waited; afterwards both get the same."""
    b = bench(FairScheduler, FairConfig(quantum=12), max_seqs=2)
    for _ in range(4):
        b.add(PROMPT, 50, user="old")
        b.step(80)
    assert b.engine.scheduler.stats().waiting == 0 < b.engine.scheduler.stats().running
    before = len(b.entries)
    for _ in range(20):
        b.add(PROMPT, 6, user="new")
        b.add(PROMPT, 6, user="old")
    b.run()
    served = [b.sequences[uid].request.user for uid in b.entries[before : before + 20]]
    assert 8 <= served.count("new") <= 12


def test_users_without_requests_are_forgotten(bench):
    b = bench(FairScheduler, FairConfig(), max_seqs=4)
    for i in range(50):
        b.add(PROMPT, 3, user=f"u{i}")
    (gone,) = b.engine.add(PROMPT, SamplingParams(max_tokens=4, temperature=0), RequestOptions(user="gone"))
    b.engine.abort(gone.uid)
    b.run()
    assert not b.engine.scheduler._users and not b.engine.scheduler._charged
