"""Shared by all tests."""

import os

# Tests share a machine; torch's own thread pool in each worker would only make them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
