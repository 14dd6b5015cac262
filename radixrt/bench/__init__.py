"""Reproducible benchmarks."""
