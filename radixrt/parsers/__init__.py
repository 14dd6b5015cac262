"""A model's answer taken apart as it comes: thoughts, content, and calls of tools."""
