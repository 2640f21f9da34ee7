"""One line of CSV per engine step."""

import csv
from dataclasses import astuple, fields

from dovetail.core.interfaces import Observer, StepRecord


class StepCsv(Observer):
    file = None

    def step(self, record):
        if self.file is None:  # Opened here, so that an engine without a step leaves no file.
            self.file = open(self.config.path, "w", newline="", buffering=1, encoding="utf-8")
            self.rows = csv.writer(self.file)
            self.rows.writerow(field.name for field in fields(StepRecord))
        self.rows.writerow(astuple(record))

    def close(self):
        if self.file is not None:
            self.file.close()
