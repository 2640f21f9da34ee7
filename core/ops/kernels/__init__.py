"""Triton kernels of the operations. Imported on first use on a GPU, since Triton exists on Linux alone."""
