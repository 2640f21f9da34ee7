"""Example plugin for Dovetail, which calls the three hooks when it composes. Nothing heavy is imported here."""

from dovetail import Component, hookimpl
from dovetail_lighthouse.config import LighthouseConfig, NoRepeatNgramConfig, StepCsvConfig, ThreeBitsConfig


@hookimpl
def dovetail_components():
    return [
        Component(
            kind="scheduler",
            name="lighthouse",
            config=LighthouseConfig,
            target="dovetail_lighthouse.scheduler:Lighthouse",
            api="scheduler/0.3",
        ),
        Component(
            kind="logits",
            name="no_repeat_ngram",
            config=NoRepeatNgramConfig,
            target="dovetail_lighthouse.no_repeat_ngram:NoRepeatNgram",
            contract="dovetail_lighthouse.contracts:NoRepeatNgramContract",
            api="logits/0.2",
        ),
        Component(
            kind="observer",
            name="step_csv",
            config=StepCsvConfig,
            target="dovetail_lighthouse.step_csv:StepCsv",
            api="observer/0.1",
        ),
        Component(
            kind="quant",
            name="three_bits",
            config=ThreeBitsConfig,
            target="dovetail_lighthouse.three_bits:ThreeBits",
            reads="dovetail_lighthouse.three_bits_checkpoint:reads",
            contract="dovetail_lighthouse.contracts:ThreeBitsContract",
            api="quant/0.3",
        ),
    ]


@hookimpl
def dovetail_config_dirs():
    return ["pkg://dovetail_lighthouse.conf"]


@hookimpl
def dovetail_tuning_tables():
    return ["pkg://dovetail_lighthouse/tables/lantern.json"]
