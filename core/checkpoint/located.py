"""Files in errors about the content of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dovetail.core.errors import ConfigError, TensorError, TextError, shown
from dovetail.core.interfaces.checkpoint import Checkpoint


@contextmanager
def located(checkpoint: Checkpoint) -> Iterator[None]:
    """Add the file to errors about a text or tensor of the checkpoint."""
    try:
        yield
    except TextError as error:
        raise ConfigError(f"{checkpoint.where(error.name)}: {error.reason}") from None
    except TensorError as error:
        header = checkpoint.tensors().get(error.name)
        raise ConfigError(f"{shown(checkpoint.path if header is None else header.file)}: {error}") from None
