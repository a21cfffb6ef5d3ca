"""Property tests draw the same examples in every run, so that a suite that passed passes again.

`make explore` draws new ones; what it finds becomes an `@example` or a test of its own.
"""

from hypothesis import settings

# A deadline times a machine that is shared, and a database is a run's memory of another run.
settings.register_profile("suite", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None, database=None, print_blob=True)
settings.load_profile("suite")
