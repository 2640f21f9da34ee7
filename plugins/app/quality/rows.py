"""Scores of every position of the windows, computed from whole rows of logits as the engine makes them.

Shapes: W windows, P positions with a following token, N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dovetail.core.errors import ConfigError, DovetailError

ROWS = 16
"""Rows that are compared at a time, in float64: memory of the device may be scarce once the KV cache is allocated."""


def check_bytes(windows: int, length: int, vocab: int, itemsize: int, most: int) -> None:
    """Raise ConfigError if the reference's logits need more than `most` bytes."""
    if (needed := windows * length * vocab * itemsize) > most:
        raise ConfigError(
            f"the reference's logits need {needed / 2**30:.3g} GiB ({windows} windows x {length} tokens x {vocab} "
            f"logits x {itemsize} bytes), more than quality.reference_bytes={most} ({most / 2**30:.3g} GiB): lower "
            "quality.windows or quality.length, or raise it if this host has the memory"
        )


class Rows:
    """Receiver of prompt logits (`dovetail.core.worker.prompt_logits`). Windows must differ and have equal lengths."""

    def __init__(
        self,
        windows: Sequence[tuple[int, ...]],
        *,
        reference: Rows | None = None,
        most_bytes: int = 0,
        on_rows: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Compare with `reference`; None = keep the logits, in at most `most_bytes` of host memory, for others to
        compare with. `on_rows` is called with the number of rows received."""
        self._place = {ids: w for w, ids in enumerate(windows)}
        self._ids_WP = torch.tensor(windows)
        self._reference, self._most_bytes, self._on_rows = reference, most_bytes, on_rows
        shape = len(windows), len(windows[0]) - 1
        self._received_WP = np.zeros(shape, bool)
        self.nll_WP = np.zeros(shape)
        """Negative log-likelihood of the following token, nats."""
        self.kl_WP = np.zeros(shape)
        """KL(reference || this), nats; 0 without a reference."""
        self.same_top_WP = np.ones(shape, bool)
        """Whether the most likely token is the reference's."""
        self._kept_WPV: torch.Tensor | None = None

    def receive(self, prompt_ids: Sequence[int], position: int, logits_NV: torch.Tensor) -> None:
        w = self._place.get(tuple(prompt_ids))
        if w is None:
            return
        for first in range(0, len(logits_NV), ROWS):
            self._score(w, position + first, logits_NV[first : first + ROWS])
        if self._reference is None:
            self._keep(w, position, logits_NV)
        self._on_rows(len(logits_NV))

    def check(self) -> None:
        """Raise DovetailError unless all rows came and are finite."""
        if not self._received_WP.all():
            raise DovetailError(
                f"logits of {(~self._received_WP).sum()} of {self._received_WP.size} positions did not reach this "
                "process: choose an executor whose rank 0 runs in it and computes logits, such as executor=inproc"
            )
        if not (finite_WP := np.isfinite(self.nll_WP)).all():
            w, p = np.argwhere(~finite_WP)[0]
            raise DovetailError(f"the log-likelihood at position {p} of window {w} is {self.nll_WP[w, p]}")

    def _score(self, w: int, position: int, logits_NV: torch.Tensor) -> None:
        at = slice(position, position + len(logits_NV))
        logprobs_NV = logits_NV.double().log_softmax(-1)
        following_N = self._ids_WP[w, at.start + 1 : at.stop + 1].to(logits_NV.device)
        self.nll_WP[w, at] = -logprobs_NV.gather(1, following_N[:, None])[:, 0].cpu().numpy()
        self._received_WP[w, at] = True
        if self._reference is not None:
            theirs_NV = self._reference._kept_WPV[w, at].to(logits_NV.device)
            self.kl_WP[w, at] = _kl(theirs_NV.double().log_softmax(-1), logprobs_NV).cpu().numpy()
            self.same_top_WP[w, at] = (theirs_NV.argmax(-1) == logits_NV.argmax(-1)).cpu().numpy()

    def _keep(self, w: int, position: int, logits_NV: torch.Tensor) -> None:
        if self._kept_WPV is None:
            (windows, length), vocab = self.nll_WP.shape, logits_NV.shape[1]
            check_bytes(windows, length, vocab, logits_NV.element_size(), self._most_bytes)
            self._kept_WPV = torch.empty(windows, length, vocab, dtype=logits_NV.dtype)
        self._kept_WPV[w, position : position + len(logits_NV)] = logits_NV


def _kl(reference_NV: torch.Tensor, logprobs_NV: torch.Tensor) -> torch.Tensor:
    """Return KL(reference || other) of log-probabilities. Tokens that the reference excludes (-inf) add nothing."""
    terms_NV = reference_NV.exp() * (reference_NV - logprobs_NV)
    return terms_NV.where(reference_NV.isfinite(), 0.0).sum(-1)
