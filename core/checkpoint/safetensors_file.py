"""Opens safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dovetail.core.errors import ConfigError, shown
from dovetail.core.files import refuse_pointer


def open_safetensors(file: Path) -> Any:
    """Return a reader with `keys()` and `get_slice(name)` -> LazyTensor of torch tensors. Raises ConfigError for an
    unreadable file."""
    return _open(file, "pt")


def open_headers(file: Path) -> Any:
    """Return a reader like `open_safetensors`, for headers alone: it does not import torch. It also refuses a file
    whose size is not the one that its header states."""
    return _open(file, "np")


def _open(file: Path, framework: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework=framework, device="cpu")
    except (SafetensorError, OSError) as error:
        refuse_pointer(file)
        raise ConfigError(
            f"{shown(file)}: cannot be read as safetensors ({shown(error)}). Download or copy the file again"
        ) from None
