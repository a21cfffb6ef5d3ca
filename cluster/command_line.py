"""A command line from settings: how one command starts another like itself on a different node."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click


def as_arguments(command: click.Command, values: Mapping[str, Any]) -> list[str]:
    """Return the arguments that give `command` these values. Pure.

    Args:
        command: whose parameters `values` are.
        values: by parameter name, as click has converted them. Those that equal the default are
            left out.
    """
    positional, options = [], []
    for param in command.params:
        value = values.get(param.name or "")
        if value is None or value == param.default or (value == () and param.multiple):
            continue
        if isinstance(param, click.Argument):
            positional.append(str(value))
        elif isinstance(param, click.Option):
            options += _option(param, value)
    return [*positional, *options]


def _option(option: click.Option, value: Any) -> list[str]:
    if option.is_flag:
        return [_long(option.opts if value else option.secondary_opts)]
    if option.multiple:
        return [text for each in value for text in (_long(option.opts), _text(each))]
    return [_long(option.opts), _text(value)]


def _long(names: Sequence[str]) -> str:
    return max(names, key=len)


def _text(value: Any) -> str:
    """As the option's type reads it back."""
    match value:
        case (int(), int()):  # a range of ports
            return "-".join(map(str, value))
        case tuple() | dict():
            return json.dumps(value)
        case Path():
            return str(value.resolve())
    return str(value)
