#!/usr/bin/env python3
"""Simulated load on the real scheduler: `python scripts/simulate_load.py --help`, docs/throughput.md."""

from __future__ import annotations

import sys
from pathlib import Path

# runs from a checkout too, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

if __name__ == "__main__":
    try:
        from simulation.main import main
    except ModuleNotFoundError as error:
        print(f"simulate_load.py: error: {error.name} is missing: pip install 'kvblend[server,eval]'", file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
