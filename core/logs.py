"""Logging for programs under supervision: readable text, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

_STANDARD = {*vars(logging.LogRecord("", 0, "", 0, "", (), None)), "message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time (ISO 8601, UTC), level, logger and message, followed by the fields of
    `extra={...}` and by the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD and key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(form: Literal["text", "json"], *, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Log to `stream` (default stderr) in this format, replacing the root logger's handlers: Dovetail's records from
    `level` on, others from warnings on. For programs, not libraries."""
    handler = logging.StreamHandler(stream or sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("dovetail").setLevel(level)
