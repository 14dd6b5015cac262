"""Activations, element by element."""
