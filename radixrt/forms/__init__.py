"""Answers in a given form: which tokens may come next."""

from __future__ import annotations
