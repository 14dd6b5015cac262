"""How a pass is computed."""
