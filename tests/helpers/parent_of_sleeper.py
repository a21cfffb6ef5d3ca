"""Starts a child that sleeps under `die_with_parent`: `python -m tests.helpers.parent_of_sleeper
True|False` (at_once) prints the child's pid and waits to be killed."""

import multiprocessing
import os
import sys
import time

from engine import lifecycle, log


def sleep(at_once: bool) -> None:
    log.configure("sleeper")
    lifecycle.die_with_parent(at_once=at_once, is_first_to_know=not at_once)
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(
        target=sleep, args=(sys.argv[1] == "True",)
    ).start()
    time.sleep(600)
