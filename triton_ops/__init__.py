"""Layer 0: one file an operation, each a public function on plain tensors. Nothing is imported here."""
