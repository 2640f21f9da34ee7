"""Tuning: tables of measured choices, the machine's cache of them, their search, and a prediction where none exist.

This module imports nothing, and `table` and `packages` import no torch: app=plugins reads the tables of all packages.
"""
