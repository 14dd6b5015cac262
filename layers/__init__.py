"""Layer 2: the layers of models, and the metadata of a forward pass."""
