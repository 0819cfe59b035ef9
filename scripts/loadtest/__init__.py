"""The parts of `scripts/load_test.py`."""
