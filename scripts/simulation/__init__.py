"""Simulated load: the scheduler's and the loader's real cores, with device and disk as models."""
