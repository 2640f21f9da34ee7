"""Messages between front-end and engine: what arrives is what was sent."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.core.frontend.messages import SampleUpdate, StepMessage, decode_output, encode_output
from dovetail.core.interfaces import LogprobColumns, TokenLogprobs


@pytest.mark.parametrize("top", [0, 2, 3])
def test_log_probabilities_arrive_as_they_were(top: int) -> None:
    """Columns and tuples, for output and prompt; the three tokens are part of a step's rows."""
    rng = np.random.default_rng()
    floats, ids = rng.standard_normal((5, 4), np.float32), rng.integers(0, 1000, (5, 3), np.int32)
    columns = LogprobColumns(np.concatenate((floats.view(np.int32), ids), 1), range(1, 4), top)
    expected = [
        TokenLogprobs(float(row[0]), tuple(zip(best.tolist(), row[1:].tolist(), strict=True))[:top])
        for row, best in zip(floats[1:4], ids[1:4], strict=True)
    ]
    updates = [
        SampleUpdate(1, 0, (5, 6, 7), logprobs=columns),
        SampleUpdate(2, 0, (5, 6, 7), logprobs=tuple(expected), prompt_logprobs=columns[1:]),
        SampleUpdate(3, 0, (5,), logprobs=columns[::-2]),
        SampleUpdate(4, 0, (5,)),
    ]
    found = decode_output(encode_output(StepMessage(updates))).updates
    assert [list(update.logprobs) for update in found] == [expected, expected, expected[::-2], []]
    assert [list(update.prompt_logprobs) for update in found] == [[], expected[1:], [], []]
