"""Which prefixes are in the pool, and who owns every slot."""
