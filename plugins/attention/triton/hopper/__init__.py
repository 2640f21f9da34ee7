"""Attention of prompts on Hopper, in Triton's Gluon."""
