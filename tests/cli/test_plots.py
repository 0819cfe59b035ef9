from __future__ import annotations

from pathlib import Path
from typing import Any

from kvblend.cli.plots import draw_quality, group_rows


def row(method: str, charged: float, recovery: float = 0.5) -> dict[str, Any]:
    interval = {"kl_recovery": (recovery - 0.1, recovery + 0.1)}
    return {"method": method, "charged_ratio": charged, "kl_recovery": recovery, "ttft_ms_median": 5.0, "ci": interval}


def test_a_method_is_one_line_from_cheap_to_dear() -> None:
    groups = group_rows([row("b", 0.2), row("a", 0.3), row("b", 0.1)])
    assert [(name, [r["charged_ratio"] for r in rows]) for name, rows in groups.items()] == [
        ("b", [0.1, 0.2]),
        ("a", [0.3]),
    ]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw_quality([row("full", 1.0, 1.0), row("query", 0.1), row("query", 0.2)], tmp_path / "a.png", "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_an_interval_beside_the_figure_is_drawn_as_well(tmp_path: Path) -> None:
    skewed = {**row("query", 0.1), "ci": {"kl_recovery": (0.6, 0.7)}}
    draw_quality([skewed], tmp_path / "a.svg", "title")
    assert "<svg" in (tmp_path / "a.svg").read_text()
