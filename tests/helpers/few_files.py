"""`python -m tests.helpers.few_files serve …`: raywire where a process may open 256 files."""

import resource

from cluster.__main__ import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    main()
