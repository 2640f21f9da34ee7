"""Options of adapter=mine."""

from dovetail import Config
from pydantic import Field


class MineConfig(Config):
    """Factor for every output of the layers that the file scales.safetensors of an adapter names."""

    load: dict[str, str] = {}
    """Name -> folder, loaded at start-up."""
    slots: int = Field(2, ge=1)
    """Maximum number of different adapters in one step."""
