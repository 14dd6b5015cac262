"""`/v1/files`: what a client keeps at the server, each tenant in a folder of its own."""

# Tests: tests/server/test_files.py
