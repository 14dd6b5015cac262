"""Answers in a given form: which tokens may come next."""

# Tests: tests/forms/test_compiler.py

from __future__ import annotations
