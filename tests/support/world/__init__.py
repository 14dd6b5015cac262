"""A world without torch: the real engine, scheduler, cache and pools around a model that is a hash.

The KV of a slot is a hash of the weights and of everything read before it through the answer's row, and the next
token depends on all that is read, so that one wrong or stale slot anywhere changes what comes out. Passes run at
a moment that the test chooses between launch and collection. `World.check` recomputes every invariant.
"""
