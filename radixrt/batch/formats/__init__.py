"""What lines and records of batch files look like."""
