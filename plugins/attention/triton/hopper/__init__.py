"""Attention of prompts and of single tokens on Hopper, in Triton's Gluon."""
