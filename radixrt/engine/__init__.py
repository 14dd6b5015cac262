"""The loop that runs passes, and the threads that wait for it."""
