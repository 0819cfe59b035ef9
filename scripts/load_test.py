#!/usr/bin/env python3
"""Load test of a kvblend server or any OpenAI-compatible one: `python scripts/load_test.py --help`, docs/load-test.md.

Takes the options of `vllm bench serve` and gives its result block and JSON keys. Needs `pip install 'kvblend[load]'`.
Ends with 0 when every request was answered, 1 when some failed, 2 where nothing could be sent.
"""

from __future__ import annotations

import sys
from pathlib import Path

# runs from a checkout too, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

if __name__ == "__main__":
    try:
        from loadtest.main import main
    except ModuleNotFoundError as error:
        print(f"load_test.py: error: {error.name} is missing: pip install 'kvblend[load]'", file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
