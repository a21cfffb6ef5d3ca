"""Options of a click command under headings, so that a long help can be read. Used by `cli`."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar

import click

from cluster import vllm_flags

F = TypeVar("F", bound=Callable[..., Any])

_ALIKE = 0.8
"""How much of its letters an option shares with another one that may have been meant. Click guesses
from less on, and then of everything."""


class GroupedOption(click.Option):
    """An option that knows its heading."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """Shows its options under their headings, in the order in which headings first appear, and
    knows what to do instead of options that others have."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            ours = {name for param in self.get_params(ctx) for name in param.opts}
            if (advice := vllm_flags.advice(error.option_name, given, ours)) is None:
                alike = get_close_matches(error.option_name, ours, cutoff=_ALIKE)
                raise click.NoSuchOption(error.option_name, possibilities=alike, ctx=ctx) from error
            raise click.UsageError(advice, ctx) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if not isinstance(param, click.Option):
                continue  # arguments are explained in the text
            if (record := param.get_help_record(ctx)) is not None:
                group = param.group if isinstance(param, GroupedOption) else "Help"
                groups.setdefault(group, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=34)


def in_group(group: str) -> Callable[..., Callable[[F], F]]:
    """Return click's `option` decorator for one heading."""

    def option(*args: Any, **kwargs: Any) -> Callable[[F], F]:
        return click.option(*args, cls=GroupedOption, group=group, **kwargs)

    return option
