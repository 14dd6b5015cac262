"""What many sequences share: their order, and the radix tree that they make. Numpy only."""
