"""Integer arithmetic."""

from __future__ import annotations

import pytest

from dovetail.core.arithmetic import ceil_div, power_of_2


@pytest.mark.parametrize("divisor", [1, 2, 7, 128])
def test_quotients_are_rounded_up(divisor: int) -> None:
    for dividend in range(300):
        quotient = ceil_div(dividend, divisor)
        assert quotient * divisor >= dividend > (quotient - 1) * divisor


def test_powers_of_two_are_the_smallest_that_suffice() -> None:
    for least in range(1, 5000):
        power = power_of_2(least)
        assert power.bit_count() == 1 and power >= least > power // 2
