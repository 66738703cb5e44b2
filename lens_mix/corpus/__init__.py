"""Map a corpus: many prompts, in shards that survive an interruption, by one process or many."""

from lens_mix.corpus.job import Summary, run
from lens_mix.corpus.reductions import Mean, largest_per_head
from lens_mix.corpus.tables import by_prompt, load, maps

__all__ = ["Mean", "Summary", "by_prompt", "largest_per_head", "load", "maps", "run"]


def __dir__() -> list[str]:
    return __all__
