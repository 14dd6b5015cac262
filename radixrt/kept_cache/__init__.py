"""A prefix cache in a file, from one process to the next."""
