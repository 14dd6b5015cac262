"""Processes that write streams: see `writers`."""
