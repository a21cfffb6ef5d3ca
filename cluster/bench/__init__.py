"""`raywire bench`: what this machine makes of raywire, measured as users meet it.

`cli` has the commands and their flags, and is light. Each command's own file measures, and is
imported when it runs; `results` is the table and the JSON that all of them give.
"""
