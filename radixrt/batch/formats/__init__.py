"""Formats of batch files: lines, records, compression."""
