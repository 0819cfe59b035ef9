"""How KL grows with what a blend shows, as measured (docs/quality.md, "A bound per request")."""

from __future__ import annotations

from kvblend.engine.bound import KLModel
from kvblend.engine.selectors.spec import SelectorSpec

SHAPE = KLModel(level=0.0, slope=0.5, per_ratio=-1.5, per_entropy=0.6, margin=0.0, spread=0.0, samples=0)
"""The growth alone: level and margin are a matter of the model and the way rows are chosen."""

_SMOLLM2 = "41aa4d98a643bbbe45bdb5c7b5f56af7ecd25e7cb9e7316b2c0ec38f411f2b82"
# 12 prompts of built-in probes, chunks behind the shipped text, float32: what a server would measure itself
_SHIPPED: dict[tuple[str, str, SelectorSpec], KLModel] = {
    (_SMOLLM2, "warm", SelectorSpec("sensitive", probes=0.25, residual="distance")): KLModel(
        level=-2.115,
        slope=0.5,
        per_ratio=-1.5,
        per_entropy=0.6,
        margin=2.099,
        spread=0.901,
        samples=39,
        centre=-2.950,
        width=0.484,
    )
}


def shipped_model(fingerprint: str, conditioning: str, kind: SelectorSpec) -> KLModel | None:
    """The estimate that was measured for a model and a way of blending, where there is one."""
    return _SHIPPED.get((fingerprint, conditioning, kind))
