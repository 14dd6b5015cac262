"""`/v1/batches`: files of requests that run in the background, beside those of clients that wait.

    endpoints      what clients ask for, and what they are told
    record         a batch as it is kept on disk, and as clients see it
    queue          a tenant's batches: one after the other, in a thread
    work           what is computed of one, by `radixrt.batch`
    chats          answers to chats, taken apart as those to clients are
    background     the served Runtime as `radixrt.batch` sees it: after all requests of clients
    outcome        the records, in a file of answers and a file of errors

`service` has all tenants' of one server.
"""

# Tests: tests/server/test_batches.py
