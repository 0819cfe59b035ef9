"""Tensors and arithmetic: synchronous, deterministic, without clock, network or store."""
