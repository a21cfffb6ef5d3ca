"""ENTRY of the command: `raywire …` or `python -m cluster …`."""


def main() -> None:
    """Run the command line and exit."""
    # Not at the top: a spawned child imports the main module of its parent again, which for the
    # installed `raywire` script means this file, and it needs no command line.
    from cluster.cli import run

    run()


if __name__ == "__main__":
    main()
