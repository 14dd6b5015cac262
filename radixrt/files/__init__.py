"""Files and the disk."""
