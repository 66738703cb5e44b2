"""What every hook of this package is: a function that counts its calls, and its pair for `fwd_hooks=`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class HookFunction(abc.ABC):
    """A hook for a forward pass, called by TransformerLens as `function(tensor, hook=hook_point)`.

    `calls` counts how often the edit (or the recording) was done; it stays 0 while the hook has no effect.
    """

    calls: int = 0

    @abc.abstractmethod
    def __call__(self, tensor: Tensor, hook: Any) -> Tensor | None:
        """The edited tensor; None where nothing is changed."""


HookName = str | Callable[[str], bool]
HookPair = tuple[HookName, HookFunction]  # one entry of `fwd_hooks=`


@contextmanager
def must_fire(*pairs: HookPair) -> Iterator[list[HookPair]]:
    """Yield the pairs as a list for `fwd_hooks=`, and raise if one did nothing inside the `with` block.

    A hook point that a model does not have, or never reaches, is no error everywhere: some TransformerLens
    releases ignore unknown names, and a filter that matches nothing is always legal.

    Raises:
        RuntimeError: at the end of the block, naming the hooks whose `calls` did not grow.

    Example:
        ```python
        from lens_mix.hooks import must_fire, zero_values

        with must_fire(zero_values(0, 3)) as hooks:
            logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
        ```
    """
    before = [function.calls for _, function in pairs]
    yield list(pairs)
    idle = [function for (_, function), calls in zip(pairs, before, strict=True) if function.calls == calls]
    if idle:
        raise RuntimeError(
            f"expected every hook to fire; got no call of {', '.join(map(repr, idle))}. Does the model have "
            "these hook points (see model.hook_dict), and did the pass reach them?"
        )
