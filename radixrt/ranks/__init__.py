"""Ranks: processes that compute one model together, each with its part of the weights."""
