"""From what a caller gives to requests that can run."""
