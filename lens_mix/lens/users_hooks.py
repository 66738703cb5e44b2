"""Whether the user's own hooks are on a model, beside those that TransformerLens puts there itself.

What TransformerLens puts on a model treats all positions alike: the Bridge wires its hook points with hooks
of torch's in the first forward pass, and replaces the `forward` of some Hugging Face modules. What a user
puts there may act on any single position, and so may a class that none of the libraries wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as everywhere
from transformer_lens.hook_points import HookPoint

# accelerate replaces `forward` to load offloaded weights.
_LIBRARIES = frozenset({"transformer_lens", "lens_mix", "accelerate"})
_WRITE_CLASSES = _LIBRARIES | {"torch", "transformers"}
# Hands on what parts of a feed-forward read and give to the hook points of the whole (OPT, BERT, BART).
_MIRRORS = "transformer_lens.model_bridge.component_setup"
# What Hugging Face leaves on a model once it was asked for patterns, as `run_with_cache` of a Bridge does.
_CAPTURES = "transformers.utils.output_capturing"
# What every module of torch has.
_MODULES_OWN = frozenset(vars(nn.Module()))


def named_users_hooks(model: nn.Module) -> list[str]:
    """Where the user's hooks are and what they are called, for errors: "blocks.1.attn.hook_z (zero_head)"."""
    trees = {"": model, "original_model.": getattr(model, "original_model", None)}
    modules = {
        id(module): (f"{prefix}{name}".replace("._original_component", ""), module)
        for prefix, tree in reversed(trees.items())
        if isinstance(tree, nn.Module)
        for name, module in tree.named_modules()
    }
    hooks = [
        f"{name} ({_name(function)})"
        for name, module in modules.values()
        for function in _users_functions(module)
    ]
    classes = {type(module): None for _, module in modules.values()}
    hooks += [f"{kind.__name__} (its own forward)" for kind in classes if _is_users(kind)]
    return hooks + (["every module (torch's global hooks)"] if _hooks_everywhere() else [])


def _name(function: Any) -> str:
    # TransformerLens 2 does not keep the functions that its hooks wrap.
    return "a hook" if function is None else getattr(function, "__name__", type(function).__name__)


def carries_users_hooks(modules: Sequence[nn.Module]) -> bool:
    """Whether anyone but TransformerLens and lens_mix has hooked a module, or replaced its `forward`.

    Hooks that torch calls on every module of any model count too, and a `forward` that the user gave to a
    class. `modules` are all of one model.
    """
    classes = {type(module) for module in modules}
    return _hooks_everywhere() or any(map(_is_users, classes)) or any(map(_users_functions, modules))


def users_functions(modules: Sequence[nn.Module]) -> list[tuple[int, Any]]:
    """Return the functions that the user put on a model: hooks, and a `forward` of a module or a class.

    Hooks on gradients too. Each comes after the place in `modules` where it is, -1 for all modules.
    """
    functions: list[tuple[int, Any]] = [(-1, hook) for hook in everywhere._global_forward_pre_hooks.values()]
    functions += [(-1, hook) for hook in everywhere._global_forward_hooks.values()]
    kinds: dict[type[nn.Module], None] = dict.fromkeys(map(type, modules))
    functions += [(-1, kind.forward) for kind in kinds if _is_users(kind)]
    for place, module in enumerate(modules):
        found = _users_functions(module)
        # TransformerLens 2 does not list the functions that its hooks wrap, but its wrappers refer to them.
        found = [*module._forward_hooks.values()] if None in found else found
        found += [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
        functions += [(place, function) for function in found]
    return functions


def settings_of_users_modules(
    modules: Sequence[nn.Module],
) -> tuple[tuple[tuple[str, tuple[Any, ...]], ...], ...]:
    """Return the numbers, strings and switches of each module of the user's, in lists and the like too."""
    kinds = {kind for kind in set(map(type, modules)) if _is_users(kind)}
    return tuple(
        tuple(
            (name, values)
            for name, value in vars(module).items()
            if name not in _MODULES_OWN and (values := plain_values(value)) is not None
        )
        for module in modules
        if type(module) in kinds
    )


def plain_values(value: object) -> tuple[Any, ...] | None:
    """Return the numbers, strings and switches that a value is made of; None if it is made of others too.

    Values that are equal give the same, also in another process. What contains itself is gone through once.
    """
    values: list[Any] = []
    waiting, places = [value], dict[int, int]()
    while waiting:
        one = waiting.pop()
        if one is None or isinstance(one, (bool, int, float, str)):
            values.append(one)
            continue
        if id(one) in places:
            values.append(("again", places[id(one)]))
            continue
        if isinstance(one, dict):
            inner = [*one, *one.values()]
        elif isinstance(one, (set, frozenset)):
            inner = sorted(one, key=repr)
        elif isinstance(one, (list, tuple)):
            inner = list(one)
        else:
            return None
        places[id(one)] = len(places)
        values.append((type(one).__name__, len(inner)))
        waiting += inner
    return tuple(values)


def _is_users(kind: type[nn.Module]) -> bool:
    functions: list[Any] = [kind.forward, kind.__call__]
    for function in functions:
        # torch's `no_grad` and the like wrap what anybody wrote.
        functions += [function.__wrapped__] if hasattr(function, "__wrapped__") else []
    return any(_home(function).partition(".")[0] not in _WRITE_CLASSES for function in functions)


def _hooks_everywhere() -> bool:
    return bool(everywhere._global_forward_pre_hooks or everywhere._global_forward_hooks)


def _users_functions(module: nn.Module) -> list[Any]:
    attributes = vars(module)
    functions = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    functions += [attributes["forward"]] if "forward" in attributes else []
    # What accelerate replaced: a module's own method, or one that somebody put there before.
    replaced = attributes.get("_old_forward")
    if replaced is not None and getattr(replaced, "__self__", None) is not module:
        functions.append(replaced)
    if not functions:
        return []  # as most modules have none, and every run asks all of them
    users = [
        function
        for function in functions
        if (home := _home(function)).partition(".")[0] not in _LIBRARIES and home != _CAPTURES
    ]
    # To torch these are hooks of TransformerLens, which wraps them. All but the mirrors count, whoever wrote
    # them: TransformerLens and lens_mix have functions that are meant to be put on a model by its user.
    points = module.fwd_hooks if isinstance(module, HookPoint) else []
    hooks = [getattr(handle, "user_hook", None) for handle in points]
    return users + [hook for hook in hooks if _home(hook) != _MIRRORS]


def _home(function: Callable[..., Any] | None) -> str:
    """The module that a function was written in; "" where that can't be told.

    Its `__module__` would not do: `functools.wraps` gives a user's function that of what it wraps.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__globals__"):
        function = type(function).__call__  # an object that can be called
    return str(getattr(function, "__globals__", {}).get("__name__", ""))
