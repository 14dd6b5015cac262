"""Memory and free lists: rows of slots for requests, slots of KV for tokens. No requests or trees here."""
