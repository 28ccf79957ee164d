"""Lookahead Reasoning as a server: step-level speculative decoding behind Triton Inference Server."""

__version__ = "0.2.0"
