"""Options of the three components. Listing and validating import this module, so it imports no torch."""

from pydantic import Field

from dovetail import Config


class LighthouseConfig(Config):
    """Newest request first; who has waited for max_age goes before all others, oldest first."""

    max_age: float = Field(10.0, ge=0)
    """Seconds from arrival after which a request counts as late. 0 = all are late: first come, first served."""


class NoRepeatNgramConfig(Config):
    """No n-gram of tokens comes twice. A request sets its own n, up to `longest`."""

    size: int = Field(0, ge=0)
    """n for requests that set none, tokens; 0 = none."""
    longest: int = Field(8, ge=1, le=64)
    """Largest n that is allowed, tokens; every step makes so many comparisons per token of history."""
    prompt: bool = True
    """Whether n-grams of the prompt count."""

    def model_post_init(self, context: object) -> None:
        if self.size > self.longest:
            raise ValueError(f"size={self.size} is more than longest={self.longest}")


class NoRepeatNgramParams(Config):
    """What a request may say: SamplingParams(extra={"no_repeat_ngram": 3})."""

    no_repeat_ngram: int | None = Field(None, ge=0)
    """n, tokens; 0 = none; null = the option `size`."""


class StepCsvConfig(Config):
    """One line of CSV per engine step, the names of the columns first."""

    path: str = "steps.csv"
    """File to write, overwritten; each engine needs one of its own."""
