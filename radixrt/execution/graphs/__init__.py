"""Captured passes."""
