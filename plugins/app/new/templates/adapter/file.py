"""The file of an adapter."""

from dovetail import RequestError
from safetensors import SafetensorError, safe_open


def opened(folder, known):
    """Return the open file. Raises RequestError if it cannot be read or names layers that are not `known`."""
    try:
        file = safe_open(folder / "scales.safetensors", "pt")
    except (OSError, SafetensorError) as error:
        raise RequestError(f"adapter: {error}") from None
    if unknown := set(file.keys()) - known:
        raise RequestError(f"adapter: no layers {sorted(unknown)[:3]}")
    return file
