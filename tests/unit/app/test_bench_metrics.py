"""Figures of runs with handmade timelines."""

from __future__ import annotations

import pytest

from dovetail.core.interfaces import SLO
from dovetail.plugins.app.bench.metrics import Timeline, knee, measure, per_token_of_run, spread, summarize


def line(arrival: float, *came: tuple[float, int], prompt: int = 10, slo: SLO | None = None) -> Timeline:
    made = Timeline(arrival, prompt, slo)
    for clock, tokens in came:
        made.came(clock, tokens)
    return made


STEADY = line(1.0, (1.5, 1), (1.7, 1), (1.9, 1), (2.1, 1))
SPECULATED = line(0.0, (1.0, 1), (2.0, 3), (4.0, 2))


def test_one_request() -> None:
    assert (STEADY.ttft, STEADY.tokens) == (0.5, 4)
    assert pytest.approx(0.2) == STEADY.tpot
    assert pytest.approx(1.1) == STEADY.e2e
    assert list(STEADY.gaps) == pytest.approx([0.2] * 3)


def test_tokens_that_come_together_are_one_arrival() -> None:
    assert (SPECULATED.tokens, list(SPECULATED.gaps)) == (6, [1.0, 2.0])
    assert pytest.approx(3.0 / 5) == SPECULATED.tpot
    assert line(0.0, (1.0, 2), (2.0, 1)).tpot == pytest.approx(1.0), "what came at first took no time after it"


def test_a_single_token_has_no_time_per_token() -> None:
    single = line(0.0, (0.3, 1))
    assert single.tpot is None and list(single.gaps) == []
    found = measure([single], SLO())
    assert found["tpot_ms"] is None and found["itl_ms"] is None and found["ttft_ms"]["median"] == 300.0


def test_a_run() -> None:
    failed = line(0.0)
    failed.failure = "no"
    found = measure([STEADY, SPECULATED, failed], SLO())
    assert (found["seconds"], found["requests"], found["failed"]) == (4.0, 3, 1)
    assert (found["prompt_tokens"], found["output_tokens"]) == (20, 10)
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["total_tokens_per_s"]) == (0.5, 2.5, 7.5)
    assert found["ttft_ms"] == {"mean": 750.0, "median": 750.0, "p90": 950.0, "p95": 975.0, "p99": 995.0, "max": 1000.0}
    assert found["itl_ms"]["max"] == 2000.0 and found["goodput"] is None


def test_percentiles_are_interpolated() -> None:
    found = spread(i / 1000 for i in range(101))
    assert found == {"mean": 50.0, "median": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    assert spread([]) is None


@pytest.mark.parametrize(
    ("slo", "good"), [(SLO(ttft=0.5), 1), (SLO(ttft=1.0), 2), (SLO(tpot=0.3), 1), (SLO(ttft=0.6, tpot=0.1), 0)]
)
def test_goodput_counts_requests_that_meet_all_limits(slo: SLO, good: int) -> None:
    failed = line(0.0)
    failed.failure = "no"
    found = measure([STEADY, SPECULATED, failed, failed], slo)["goodput"]
    assert found == {"requests_per_s": good / 4, "share": good / 4}


def test_a_request_with_an_objective_of_its_own_is_held_to_that() -> None:
    strict, lax = line(0.0, (1.0, 1), slo=SLO(ttft=0.5)), line(0.0, (1.0, 1), slo=SLO(ttft=5.0))
    assert measure([strict, lax], SLO())["goodput"]["share"] == 0.5
    assert measure([strict, lax], SLO(ttft=0.1))["goodput"]["share"] == 0.5


def test_time_per_token_of_the_run() -> None:
    assert per_token_of_run(whole=2.6, one_token=0.05, output_tokens=256) == pytest.approx(10.0)


def test_a_summary_has_median_and_range() -> None:
    runs = [measure([line(0.0, (t, 1), (2 * t, 1))], SLO()) for t in (1.0, 4.0, 2.0)]
    found = summarize(runs)
    assert found["ttft_ms.median"] == {"median": 2000.0, "min": 1000.0, "max": 4000.0}
    assert found["output_tokens_per_s"]["max"] == 1.0
    assert "goodput.share" not in found and "run_tpot_ms" not in found


def point(rate: float, e2e: float, share: float | None = None) -> dict:
    kept = {} if share is None else {"goodput.share": {"median": share}}
    return {"rate": rate, "e2e_ms.median": {"median": e2e}, **kept}


def test_the_knee_is_where_the_curve_bends() -> None:
    curve = [point(rate, 100 if rate <= 8 else 100 + 200 * (rate - 8)) for rate in (16, 1, 2, 4, 8, 12)]
    assert knee(curve, SLO(), 0.9).rate == 8
    assert knee(curve[:2], SLO(), 0.9) is None, "two points have no bend"
    assert knee([point(rate, 100) for rate in (1, 2, 4)], SLO(), 0.9) is None
    assert knee([point(rate, e2e) for rate, e2e in ((1, 0), (2, 50), (3, 60))], SLO(), 0.9) is None, "it flattens"


def test_a_rate_at_which_every_request_failed_has_no_part_in_the_knee() -> None:
    curve = [point(rate, 100 if rate <= 8 else 100 + 200 * (rate - 8)) for rate in (1, 4, 8, 12)]
    assert knee([*curve, {"rate": 16}], SLO(), 0.9).rate == 8
    assert knee([*curve[:2], {"rate": 16}], SLO(), 0.9) is None


def test_with_an_objective_the_knee_is_the_highest_rate_that_keeps_it() -> None:
    curve = [point(1, 1, 1.0), point(2, 1, 0.95), point(4, 1, 0.5), point(8, 1, 0.92)]
    assert knee(curve, SLO(ttft=1), 0.9).rate == 2, "what is served above a rate that is not is chance"
    assert knee(curve[2:], SLO(ttft=1), 0.9).rate is None
