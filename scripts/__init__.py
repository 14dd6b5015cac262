"""Programs to run from a checkout: `python scripts/NAME.py`."""
