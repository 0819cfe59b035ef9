"""How KL grows with what a blend shows, as measured (docs/quality.md, "A bound per request")."""

from __future__ import annotations

from kvblend.engine.bound import KLModel

SHAPE = KLModel(level=0.0, slope=0.5, per_ratio=-1.5, per_entropy=0.6, margin=0.0, spread=0.0, samples=0)
"""The growth alone: level and margin depend on the model and on how rows are chosen, and are measured at first use."""
