"""`python -m kvblend` and the `kvblend` command."""

from __future__ import annotations

import os


def main() -> None:
    """Run the command line."""
    # read once when torch loads its threads. Spinning threads are little faster on idle cores and many times slower
    # on busy ones, where they spin away the time of the thread they wait for (docs/adr/0006)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from kvblend.cli.app import app

    app()


if __name__ == "__main__":
    main()
