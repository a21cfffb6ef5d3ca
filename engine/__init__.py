"""The engine core: decides which request runs, for how many tokens, in which KV blocks.

Owns the wire types, the scheduler and the KV cache. Knows no torch, no ray, no HTTP, and nothing of
our other packages. The open side (`wire`, `step`, `codec`, `sockets`, `utility`,
`sampling_params`, `structured_output`, `token_bytes`, `config`, `errors`, `log`, `leash`,
`lifecycle`, `executor`) is what the others
import.
"""

__version__ = "0.1.0"
