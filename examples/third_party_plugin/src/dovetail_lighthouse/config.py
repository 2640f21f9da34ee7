"""Options of the three components. Listing and validating import this module, so it must not import torch."""

from pydantic import Field

from dovetail import Config


class LighthouseConfig(Config):
    """Newest request first. Requests that have waited for max_age go before all others, oldest first."""

    max_age: float = Field(10.0, ge=0)
    """Seconds from arrival after which a request is late. 0 = first come, first served."""


class NoRepeatNgramConfig(Config):
    """Bans repeated n-grams of tokens. A request may set its own n, up to `longest`."""

    size: int = Field(0, ge=0)
    """n, in tokens, for requests that set none; 0 = off."""
    longest: int = Field(8, ge=1, le=64)
    """Largest n that a request may set, in tokens. Each step makes this many comparisons per token of history."""
    prompt: bool = True
    """Whether n-grams of the prompt count."""

    def model_post_init(self, context: object) -> None:
        if self.size > self.longest:
            raise ValueError(f"size={self.size} is more than longest={self.longest}")


class NoRepeatNgramParams(Config):
    """Request parameters: SamplingParams(extra={"no_repeat_ngram": 3})."""

    no_repeat_ngram: int | None = Field(None, ge=0)
    """n, in tokens; 0 = off; null = the option `size`."""


class ThreeBitsConfig(Config):
    """Weights of 3 bits with a scale for each group of 32 inputs, inputs in E4M3."""


class StepCsvConfig(Config):
    """Writes one line of CSV per engine step, after a header line."""

    path: str = "steps.csv"
    """File to write; an existing one is overwritten. Each engine needs a separate file."""
