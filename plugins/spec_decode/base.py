"""Options that all built-in drafters share."""

from __future__ import annotations

from dovetail.core.interfaces import Drafter
from dovetail.plugins.spec_decode.config import (
    DraftModelConfig,
    HeadFiles,
    LayerSkipConfig,
    MTPConfig,
    NgramConfig,
    SuffixConfig,
)


class BuiltinDrafter(Drafter):
    config: NgramConfig | SuffixConfig | DraftModelConfig | LayerSkipConfig | HeadFiles | MTPConfig

    @property
    def lookahead(self) -> int:
        return self.config.lookahead

    @property
    def simulated_rates(self) -> tuple[float, ...]:  # type: ignore[override]
        return self.config.simulated_rates
