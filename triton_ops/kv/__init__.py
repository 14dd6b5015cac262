"""Keys and values on their way into the pool, and between pools."""
