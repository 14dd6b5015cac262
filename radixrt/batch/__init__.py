"""Offline batches: a file of prompts to a file of answers."""
