"""Linear products."""
