"""Build graphs from maps, prune them, write them to files and read them."""

from lens_mix.graphs.build import information_flow_graph, layered_graph, prune_graph
from lens_mix.graphs.files import load_graph, save_graph
from lens_mix.graphs.neuronpedia import to_neuronpedia
from lens_mix.graphs.routes import information_flow_routes

__all__ = [
    "information_flow_graph",
    "information_flow_routes",
    "layered_graph",
    "load_graph",
    "prune_graph",
    "save_graph",
    "to_neuronpedia",
]


def __dir__() -> list[str]:
    return __all__
