"""`raywire chat` and `raywire complete`: a running server, from a terminal.

`cli` has the flags, `conversation` what is sent and remembered, `terminal` reads and writes.
"""
