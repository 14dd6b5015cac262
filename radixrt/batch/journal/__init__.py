"""Records that survive the process."""
