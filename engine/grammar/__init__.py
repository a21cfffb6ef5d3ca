"""Structured output: what an output must look like becomes a mask of tokens for each step.

    StructuredOutput --> station: waits until it is compiled --> matcher: lives with its request
                           |  ^
                           v  |
                         compiler: a cache by bytes, and the tokens' texts, loaded at the first use
                           |
                           v
                         checker: a process of its own, for grammars that crash or never end

`input_thread` hands such requests to the station, which puts them into the inbox when they are
ready; `scheduler` and `core` ask matchers which tokens may come next, while the forward pass runs.
The library behind it is llguidance.
"""
