"""What the attention of a pass reads: plans, built on the host."""
