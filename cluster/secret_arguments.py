"""Keys in our own command line: what `ps`, /proc and Ray's dashboard show of it.

Ray names a job by the command line of the process that connects, so hiding comes before that.
"""

from collections.abc import Sequence

_SECRET = ("--api-key", "--admin-key", "--metrics-key")
"""Options whose value is a secret, in any command."""

_HEADER = "--header"
"""May have one: `Authorization=Bearer KEY`."""


def hide(arguments: Sequence[str]) -> None:
    """Show this process without its keys, if it was given any. As early as can be: until then
    everybody sees them."""
    shown = redacted(arguments)
    if shown != list(arguments):
        import setproctitle  # only here: most commands have nothing to hide

        setproctitle.setproctitle(" ".join(["raywire", *shown]))


def redacted(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, with stars for what is secret. Pure."""
    shown = []
    is_next_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_next_secret:
            shown.append("***")
            is_next_secret = False
        elif name in (*_SECRET, _HEADER) and equals:
            shown.append(f"{name}=***")
        else:
            shown.append(argument)
            is_next_secret = name in (*_SECRET, _HEADER)
    return shown
