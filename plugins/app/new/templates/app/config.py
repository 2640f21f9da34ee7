"""Options of app=mine."""

from typing import ClassVar

from dovetail import ENGINE_NODES, AppConfig
from pydantic import Field


class MineConfig(AppConfig):
    """Print the answer to each prompt after `--`."""

    needs: ClassVar[tuple[str, ...]] = ENGINE_NODES
    takes_prompts: ClassVar[bool] = True

    prompt: str = "def f(x):"
    """The prompt if there is none after `--`."""
    max_tokens: int = Field(8, ge=1)
    """Tokens of an answer."""
