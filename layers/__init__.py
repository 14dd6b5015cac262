"""Floor 2: what a model is built from, and what a forward pass is told about its batch."""
