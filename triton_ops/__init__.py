"""Layer 0: operations, each a public function on plain tensors. Nothing is imported here."""
