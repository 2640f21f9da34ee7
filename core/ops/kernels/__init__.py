"""Triton kernels of the operations. They are imported on first use on a GPU, since Triton exists only for Linux."""
