"""What runs in the next pass. Numpy only."""
