"""`raywire plan MODEL`: look, decide as a start would, and start nothing.

What it looks at: the model's folder, if it is on this machine (nothing is downloaded or converted),
and the Ray cluster or this machine. `layout` does the rest.
"""

from pathlib import Path

from cluster import local_node
from cluster.checkpoint import read_tensor_shapes
from cluster.config import ServeConfig
from cluster.estimate import ModelFacts
from cluster.hybrid_layout import lay_out_servers
from cluster.layout import Layout
from cluster.layout_builder import lay_out
from cluster.model_source import find
from cluster.placement import Node
from cluster.scripted_source import MAX_LENGTH
from engine import log
from engine.errors import ConfigError
from workers.model_shape import check_options, read_shape
from workers.supported import SCRIPTED, check_model_folder, read_config


def dry_run(config: ServeConfig) -> Layout:
    """Lay out a server, or those of all nodes, as a start would now.

    Raises:
        ConfigError: its start would be refused.
    """
    log.configure("plan", "ERROR")  # what serve would warn of is in the layout
    folder = find(config.engine.model, cache_dir=config.environment.cache_dir)
    facts = None if folder is None else read_facts(folder, config)
    nodes = observe_nodes(config)
    if config.is_hybrid and config.backend == "ray":
        return lay_out_servers(config, nodes, facts)
    return lay_out(config, nodes, facts)


def read_facts(folder: Path, config: ServeConfig) -> ModelFacts:
    """What can be known of a model before it is loaded.

    Raises:
        ConfigError: it cannot be loaded, or contradicts the settings.
    """
    model_type, options = check_model_folder(folder), config.engine
    description = read_config(folder)
    check_options(
        description,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        max_model_len=None if options.max_model_len == "auto" else options.max_model_len,
    )
    if model_type == SCRIPTED:
        max_len = description.get("max_position_embeddings", MAX_LENGTH)
        return ModelFacts(shape=None, tensors={}, max_len=max_len)
    if (shape := read_shape(description)) is None:
        raise ConfigError(
            f"config.json of {folder} has something else than sizes where sizes should be"
        )
    return ModelFacts(shape=shape, tensors=read_tensor_shapes(folder), max_len=shape.max_len)


def observe_nodes(config: ServeConfig) -> list[Node]:
    """The nodes as they are now: of the Ray cluster that a start would use, or this machine."""
    if config.backend == "mp":
        return [local_node.observe(config.environment.cuda_visible_devices)]
    # Ray takes a second to import, and is wanted here only.
    from cluster import ray_session

    # A cluster of our own counts as many CPUs as we ask for, and is gone after the look.
    num_servers = config.num_nodes if config.is_hybrid else 1
    num_cpus = num_servers * config.topology.num_workers
    with ray_session.connect(config.ray_address, num_cpus=num_cpus) as session:
        return session.observe_nodes()
