"""Find the user hooks on a model, and distinguish them from the hooks that TransformerLens adds itself.

In the first forward pass, the Bridge connects its hook points with torch's hooks, and it replaces the
`forward` of some Hugging Face modules. These treat all positions alike. A user hook may affect single
positions, and so may a module whose class is from none of the libraries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from transformer_lens.hook_points import HookPoint

# accelerate replaces `forward` to load offloaded weights.
_LIBRARIES = frozenset({"transformer_lens", "lens_mix", "accelerate"})
_CLASS_LIBRARIES = _LIBRARIES | {"torch", "transformers"}
# Hooks of this module pass the inputs and outputs of a feed-forward's linear layers to the hook points of the
# whole feed-forward (OPT, BERT, BART).
_FORWARDING = "transformer_lens.model_bridge.component_setup"
# Hugging Face leaves hooks of this module on a model that has returned patterns, as in `run_with_cache`.
_CAPTURING = "transformers.utils.output_capturing"
# Every module of torch has these attributes.
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


def name_user_hooks(model: nn.Module) -> list[str]:
    """Return the place and the name of each user hook, for errors: "blocks.1.attn.hook_z (zero_head)"."""
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
    hooks += [f"{kind.__name__} (its own forward)" for kind in classes if _is_users_class(kind)]
    return hooks + (["every module (torch's global hooks)"] if _has_global_hooks() else [])


def find_spliced(model: nn.Module) -> list[str]:
    """Return the hook points that SAELens has replaced by SAEs; none for other models."""
    return sorted(getattr(model, "acts_to_saes", None) or ())


def describe_spliced(model: nn.Module) -> str:
    """Return the part of an error about SAEs in the model, which may be the reason; "" without any."""
    names = find_spliced(model)
    if not names:
        return ""
    return (
        f"; SAEs replace {', '.join(names)}, so the blocks are not those of the model: run outside of `with "
        "model.saes(...)`, or after model.reset_saes()"
    )


def _name(function: Any) -> str:
    # TransformerLens 2 does not store the functions that its hooks wrap.
    return "a hook" if function is None else getattr(function, "__name__", type(function).__name__)


def has_user_hooks(modules: Sequence[nn.Module]) -> bool:
    """Return whether a model has a user hook, or a `forward` that the user wrote.

    Torch's global hooks count too, and a `forward` of a user's class.

    Args:
        modules: All modules of the model.
    """
    classes = {type(module) for module in modules}
    return _has_global_hooks() or any(map(_is_users_class, classes)) or any(map(_users_functions, modules))


def find_user_functions(modules: Sequence[nn.Module]) -> list[tuple[int, Any]]:
    """Return the user's functions on a model: hooks, backward hooks, and each `forward` that the user wrote.

    Args:
        modules: All modules of the model.

    Returns:
        Pairs of an index in `modules` and a function. The index is -1 for global hooks and for classes.
    """
    functions: list[tuple[int, Any]]
    functions = [(-1, hook) for hook in torch_module._global_forward_pre_hooks.values()]
    functions += [(-1, hook) for hook in torch_module._global_forward_hooks.values()]
    kinds: dict[type[nn.Module], None] = dict.fromkeys(map(type, modules))
    functions += [(-1, kind.forward) for kind in kinds if _is_users_class(kind)]
    for index, module in enumerate(modules):
        found = _users_functions(module)
        # TransformerLens 2 does not list the functions that its hooks wrap, but its wrappers refer to them.
        found = [*module._forward_hooks.values()] if None in found else found
        found += [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
        functions += [(index, function) for function in found]
    return functions


def read_user_module_settings(
    modules: Sequence[nn.Module],
) -> tuple[tuple[tuple[str, tuple[Any, ...]], ...], ...]:
    """Return the attributes of each module of a user's class that consist of plain values.

    Returns:
        For each such module, pairs of an attribute's name and its `plain_values`.
    """
    kinds = {kind for kind in set(map(type, modules)) if _is_users_class(kind)}
    return tuple(
        tuple(
            (name, values)
            for name, value in vars(module).items()
            if name not in _TORCH_ATTRIBUTES and (values := plain_values(value)) is not None
        )
        for module in modules
        if type(module) in kinds
    )


def plain_values(value: object) -> tuple[Any, ...] | None:
    """Return the numbers, strings and booleans in a value and its lists, tuples, sets and dicts.

    Equal values have equal results, also in another process. A container inside itself is read once.

    Returns:
        The plain values and the kinds of the containers; None if the value contains anything else.
    """
    values: list[Any] = []
    pending, container_numbers = [value], dict[int, int]()
    while pending:
        item = pending.pop()
        if item is None or isinstance(item, (bool, int, float, str)):
            values.append(item)
            continue
        if id(item) in container_numbers:
            values.append(("again", container_numbers[id(item)]))
            continue
        if isinstance(item, dict):
            inner = [*item, *item.values()]
        elif isinstance(item, (set, frozenset)):
            inner = sorted(item, key=repr)
        elif isinstance(item, (list, tuple)):
            inner = list(item)
        else:
            return None
        container_numbers[id(item)] = len(container_numbers)
        values.append((type(item).__name__, len(inner)))
        pending += inner
    return tuple(values)


def _is_users_class(kind: type[nn.Module]) -> bool:
    functions: list[Any] = [kind.forward, kind.__call__]
    for function in functions:
        # Decorators such as torch's `no_grad` may wrap a function of any author.
        functions += [function.__wrapped__] if hasattr(function, "__wrapped__") else []
    return any(_module_name(function).partition(".")[0] not in _CLASS_LIBRARIES for function in functions)


def _has_global_hooks() -> bool:
    return bool(torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks)


def _users_functions(module: nn.Module) -> list[Any]:
    """Return the forward hooks and the `forward` of a module that the user wrote."""
    attributes = vars(module)
    before, after = attributes["_forward_pre_hooks"], attributes["_forward_hooks"]
    # Most modules have none, and every run calls this for all modules, so it returns early.
    if not (before or after or "forward" in attributes or "_old_forward" in attributes):
        return []
    functions = [*before.values(), *after.values()]
    functions += [attributes["forward"]] if "forward" in attributes else []
    # accelerate stores the `forward` that it replaces: the module's own method, or one that a user set.
    replaced = attributes.get("_old_forward")
    if replaced is not None and getattr(replaced, "__self__", None) is not module:
        functions.append(replaced)
    users = [
        function
        for function in functions
        if (name := _module_name(function)).partition(".")[0] not in _LIBRARIES and name != _CAPTURING
    ]
    # TransformerLens wraps the user's hooks, so for torch they are hooks of TransformerLens. The author of a
    # wrapped function does not matter, because users may also add functions of TransformerLens and lens_mix.
    # Only the hooks of `_FORWARDING` are not the user's.
    points = module.fwd_hooks if isinstance(module, HookPoint) else []
    hooks = [getattr(handle, "user_hook", None) for handle in points]
    return users + [hook for hook in hooks if _module_name(hook) != _FORWARDING]


def _module_name(function: Callable[..., Any] | None) -> str:
    """Return the name of the module that a function was written in; "" if it is not known.

    `__module__` may be wrong, because `functools.wraps` sets it to the module of the wrapped function.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__globals__"):
        # It is an object of a class with `__call__`.
        function = type(function).__call__
    return str(getattr(function, "__globals__", {}).get("__name__", ""))
