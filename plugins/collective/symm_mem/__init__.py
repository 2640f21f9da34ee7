"""Sums over the GPUs of one host with kernels that write into the other GPUs' memory."""
