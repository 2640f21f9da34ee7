"""Built-in drafters."""

from dovetail.plugins import builtin
from dovetail.plugins.spec_decode.config import (
    DraftModelConfig,
    Eagle3Config,
    EagleConfig,
    LayerSkipConfig,
    MedusaConfig,
    MTPConfig,
    NgramConfig,
    NoneConfig,
    ParallelConfig,
    SuffixConfig,
)

COMPONENTS = tuple(
    builtin("spec_decode", name, config, target, capabilities=f"capabilities:{name}", facts=f"facts:{name}", api="0.8")
    for name, config, target in (
        ("none", NoneConfig, "none:NoDrafter"),
        ("ngram", NgramConfig, "ngram:NgramDrafter"),
        ("suffix", SuffixConfig, "suffix:SuffixDrafter"),
        ("draft_model", DraftModelConfig, "draft_model:DraftModel"),
        ("layer_skip", LayerSkipConfig, "layer_skip:LayerSkip"),
        ("eagle", EagleConfig, "eagle:Eagle"),
        ("eagle3", Eagle3Config, "eagle:Eagle3"),
        ("parallel", ParallelConfig, "parallel:Parallel"),
        ("medusa", MedusaConfig, "medusa:Medusa"),
        ("mtp", MTPConfig, "mtp:MTP"),
    )
)
