"""Identify models, methods, functions and options by plain text, to compare two evaluations.

Things with the same identity give the same numbers. Something whose identity would differ in another process
(an open file, an object written in C) raises an error.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import dis
import enum
import functools
import hashlib
import json
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from lens_mix._care.state import all_modules
from lens_mix._care.users_hooks import find_user_functions, plain_values, read_user_module_settings
from lens_mix._classes.model_classes import TransformerLensModel, transformer_lens_version
from lens_mix._classes.model_names import model_name
from lens_mix._classes.offloading import load_offloaded
from lens_mix.version import __version__

# An identity has the versions of these libraries, so the names of their functions and classes are enough.
_VERSIONS = {
    "lens_mix": __version__,
    "transformer_lens": ".".join(map(str, transformer_lens_version())),
    "torch": str(torch.__version__),
    "transformers": transformers.__version__,
}
# Settings that are the model's place or name, or that lens_mix sets itself, do not identify a model. An
# identity has the versions in an entry of their own.
_NO_SETTINGS = frozenset(
    {
        *("training", "device", "n_devices", "model_name", "tokenizer_name", "dtype", "seed"),
        "transformers_version",
    }
)
# These special methods are always written by hand. Decorators such as dataclass write others.
_WRITTEN = ("__call__", "__post_init__")


def identity_of_model(model: TransformerLensModel) -> dict[str, Any]:
    """Return what a model's numbers depend on: weights, settings, tokenizer, user hooks, versions.

    Args:
        model: The model.

    Raises:
        ValueError: Weights are not in memory, or a hook has no identity.
    """
    module: nn.Module = model  # type: ignore[assignment]
    modules = all_modules(module)
    floating = [p.dtype for p in module.parameters() if p.dtype.is_floating_point]
    return {
        "model": model_name(model),
        "dtype": sorted({str(dtype).removeprefix("torch.") for dtype in floating}),
        "weights": _digest_of_weights(modules),
        "settings": _digest_json(
            [_read_settings(module), *map(_read_settings, modules), read_user_module_settings(modules)]
        ),
        "tokenizer": _digest_json(_identify_tokenizer(getattr(model, "tokenizer", None))),
        "hooks": [[place, identity(function)] for place, function in find_user_functions(modules)],
        "versions": _VERSIONS,
    }


def identity(thing: Any, inside: tuple[int, ...] = ()) -> Any:
    """Return the identity of a value, made of plain JSON values.

    Args:
        thing: The value.
        inside: The ids of the containers around it, so that cycles end.

    Raises:
        ValueError: The value has no identity.
    """
    if thing is None or isinstance(thing, bool | int | str):
        return thing
    if isinstance(thing, float):
        # JSON has neither infinity nor NaN.
        return thing if abs(thing) < float("inf") else repr(thing)
    if isinstance(thing, enum.Enum | torch.dtype | torch.device | os.PathLike):
        return str(thing)
    if isinstance(thing, bytes):
        return hashlib.blake2b(thing, digest_size=16).hexdigest()
    if isinstance(thing, np.ndarray | np.generic):
        thing = torch.from_numpy(np.array(thing))
    if isinstance(thing, Tensor):
        hashed = hashlib.blake2b(digest_size=16)
        _add_tensor(hashed, thing)
        return f"{thing.dtype} {list(thing.shape)} {hashed.hexdigest()}"
    if id(thing) in inside:
        return "itself"
    inside = (*inside, id(thing))
    if isinstance(thing, collections.abc.Mapping):
        pairs = [[identity(key, inside), identity(value, inside)] for key, value in thing.items()]
        return dict(pairs) if all(isinstance(key, str) for key in thing) else {"mapping": pairs}
    if isinstance(thing, collections.abc.Set):
        return {"set": sorted((identity(one, inside) for one in thing), key=json.dumps)}
    if isinstance(thing, list | tuple | range):
        return [identity(one, inside) for one in thing]
    if isinstance(thing, nn.Module):
        modules = list(thing.modules())
        return [
            _full_name(type(thing)),
            _digest_of_weights(modules),
            _digest_json(list(map(_read_settings, modules))),
        ]
    if isinstance(thing, transformers.PreTrainedTokenizerBase):
        return _identify_tokenizer(thing)
    if isinstance(thing, type):
        return _identify_class(thing, inside)
    if isinstance(thing, functools.partial):
        return {"partial": identity([thing.func, thing.args, thing.keywords], inside)}
    if isinstance(thing, types.FunctionType):
        return _identify_function(thing, inside)
    if isinstance(thing, types.MethodType):
        return {_full_name(thing.__func__): identity([thing.__func__, thing.__self__], inside)}
    if isinstance(thing, types.ModuleType):
        return thing.__name__
    if isinstance(thing, types.BuiltinFunctionType) and isinstance(thing.__self__, types.ModuleType | None):
        return _full_name(thing)
    if dataclasses.is_dataclass(thing) or hasattr(thing, "__dict__"):
        fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
        values = {field.name: getattr(thing, field.name) for field in fields} or vars(thing)
        return {_full_name(type(thing)): identity([type(thing), values], inside)}
    raise ValueError(
        f"resume: expected values that can be compared in another run (plain values, functions, dataclasses "
        f"of these), got {thing!r:.80}, of type {type(thing).__name__}; leave out this value or "
        "resume="
    )


def _full_name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _digest_json(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def digest_identity(thing: Any) -> str:
    """Return a digest of 32 characters of an identity that may be long.

    Raises:
        ValueError: As in `identity`.
    """
    return _digest_json(identity(thing))


# ------------------------------------------------------------------ functions and classes


def _identify_function(function: types.FunctionType, inside: tuple[int, ...]) -> Any:
    """Return a function's name, closure and defaults; for a user's function also its code and globals."""
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    found = [_full_name(function), identity([held, function.__defaults__, function.__kwdefaults__], inside)]
    if not _is_of_a_library(function.__globals__.get("__name__")):
        steps = [step for code in _iterate_codes(function.__code__) for step in dis.get_instructions(code)]
        names = sorted({step.argval for step in steps if step.opname == "LOAD_GLOBAL"})
        read = {name: function.__globals__[name] for name in names if name in function.__globals__}
        found += [_identify_code(function.__code__), identity(read, inside)]
    return found


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    # The cell of a variable that has no value yet is empty.
    except ValueError:
        return False


def _iterate_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _iterate_codes(constant)


def _identify_code(code: types.CodeType) -> str:
    parts = []
    for one in _iterate_codes(code):
        constants = [constant for constant in one.co_consts if not isinstance(constant, types.CodeType)]
        parts.append([one.co_code.hex(), one.co_names, list(map(_identify_constant, constants))])
    return _digest_json(parts)


def _identify_constant(constant: object) -> str:
    # The order of a set differs between processes, so it is sorted.
    return str(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def _identify_class(kind: type, inside: tuple[int, ...]) -> Any:
    """Return a class's name; for a user's class also its attributes and those of its bases."""
    if _is_of_a_library(kind.__module__):
        return _full_name(kind)
    written = {}
    for name, value in sorted(vars(kind).items()):
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        is_code = isinstance(value, types.FunctionType)
        is_plain = isinstance(value, bool | int | float | str | tuple | frozenset | None)
        if (is_code or is_plain) and (name in _WRITTEN or not name.startswith("__")):
            written[name] = identity(value, inside)
    return {_full_name(kind): [written, [_identify_class(base, inside) for base in kind.__bases__]]}


def _is_of_a_library(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
    # The program that runs may be installed, as pytest is, while the functions in it are the user's.
    if root == "__main__":
        return False
    if root in _VERSIONS or root in sys.stdlib_module_names:
        return True
    path = str(getattr(sys.modules.get(root), "__file__", None) or "")
    return "site-packages" in path or "dist-packages" in path


# ------------------------------------------------------------------ what a model is made of


def _digest_of_weights(modules: list[nn.Module]) -> str:
    """Return a digest of all parameters and buffers with their dtypes. Shared ones are read once."""
    hashed = hashlib.blake2b(digest_size=16)
    seen: dict[int, int] = {}
    for place, module in enumerate(modules):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            first = seen.setdefault(id(tensor), len(seen))
            hashed.update(f"{place} {name} {first};".encode())
            if first == len(seen) - 1:
                loaded = load_offloaded(module, name) if tensor.is_meta else None
                _add_tensor(hashed, tensor if loaded is None else loaded)
    return hashed.hexdigest()


def _add_tensor(hashed: Any, tensor: Tensor) -> None:
    """Add dtype, shape and bytes of a tensor to a hash."""
    tensor = tensor.detach()
    hashed.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        hashed.update(repr(context).encode())
        for name in names:
            _add_tensor(hashed, getattr(tensor, name))
        return
    if tensor.is_meta:
        raise ValueError("resume: expected weights in memory, got a model with weights on 'meta' (offloaded)")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"resume: expected dense tensors, got one with layout {tensor.layout} and dtype {tensor.dtype}"
        )
    values = tensor.resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
    hashed.update(values.view(torch.uint8).numpy())


def _read_settings(thing: Any) -> dict[str, Any]:
    """Return the plain values among a module's attributes, and those of its configuration."""
    found: dict[str, Any] = {"class": _full_name(type(thing)), "values": _read_plain_attributes(thing)}
    for name in ("cfg", "config"):
        config = vars(thing).get(name)
        if config is not None and hasattr(config, "__dict__"):
            found[name] = _read_plain_attributes(config)
    return found


def _read_plain_attributes(thing: Any) -> list[tuple[str, tuple[Any, ...]]]:
    # The first pass may fill an attribute that is None, so these are left out.
    names = [name for name in vars(thing) if name not in _NO_SETTINGS and not name.startswith("_")]
    values = {name: plain_values(vars(thing)[name]) for name in names if vars(thing)[name] is not None}
    return sorted((name, value) for name, value in values.items() if value is not None)


def _identify_tokenizer(tokenizer: Any) -> Any:
    """Return what determines how strings are split, without the padding and truncation of the last call."""
    if tokenizer is None:
        return None
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    special["chat_template"] = str(getattr(tokenizer, "chat_template", None))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [type(tokenizer).__name__, special, sorted(tokenizer.get_vocab().items())]
    rules = json.loads(backend.to_str())
    return [special, {name: rule for name, rule in rules.items() if name not in ("padding", "truncation")}]
