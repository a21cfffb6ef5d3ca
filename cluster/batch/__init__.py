"""`raywire run-batch`: a file of requests, answered into a file of results.

`cli` has the flags and `command` the order of events. `lines` is the file format and `request_file`
and `result_file` the two files; `runner` sends the requests, `server_process` is the server that
answers them unless another one is named.
"""
