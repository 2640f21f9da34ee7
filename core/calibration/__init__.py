"""Calibrations: measured steps, the fit of a cost model to them, and the file that holds it."""
