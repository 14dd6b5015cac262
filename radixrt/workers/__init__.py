"""Processes that work for this one: started, spoken to, and ended."""
