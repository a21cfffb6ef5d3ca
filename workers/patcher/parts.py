"""What a module is made of, and how a part of a model is exchanged."""

from torch import nn


def linear_parts(module: nn.Module, *names: str) -> list[nn.Linear] | None:
    """A module's parts of these names, if each is a linear layer and nothing else."""
    parts = [getattr(module, name, None) for name in names]
    found = [part for part in parts if type(part) is nn.Linear]
    return found if len(found) == len(names) else None


def exchange(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    original = model.get_submodule(name)
    # Collectives between tensor ranks are hooks.
    module._forward_hooks.update(original._forward_hooks)
    module._forward_pre_hooks.update(original._forward_pre_hooks)
    setattr(model.get_submodule(parent), leaf, module.eval())
