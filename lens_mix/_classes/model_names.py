"""Name a model, without the folder that it was loaded from."""

from __future__ import annotations

import regex

from lens_mix._classes.model_classes import TransformerLensModel, wrapped_config

# Names of folders that do not name a model: a hash, and those that tools give to every model's folder.
_MEANS_NOTHING = regex.compile(
    r"[0-9a-f]{16,}|snapshots|models?|weights|main|checkpoints?|transformers-\d+|[A-Za-z]:"
)


def strip_path(model: str) -> str:
    """Return a model's name, never a path of this computer.

    A folder of the Hugging Face cache (`models--org--name/snapshots/…`) becomes `org/name`, and any other
    folder its own name, or the nearest folder above it that has a meaningful one.

    Args:
        model: The name or the folder that the model was loaded from.
    """
    folders: list[str] = [
        folder for folder in regex.split(r"[\\/]+", model) if folder not in ("", ".", "..", "~")
    ]
    cached = [folder for folder in folders if folder.startswith("models--")]
    if cached:
        return "/".join(cached[-1].split("--")[1:])
    if len(folders) <= 2 and regex.match(r"[\w.-]+(/[\w.-]+)?$", model) and model[0] != ".":
        return model
    meaningful = [folder for folder in folders if not _MEANS_NOTHING.fullmatch(folder)]
    return (meaningful or folders or [""])[-1]


def model_name(model: TransformerLensModel) -> str:
    """Return the model's name, or the name of its class if it has none."""
    name = getattr(getattr(model, "cfg", None), "model_name", None)
    return str(name or wrapped_config(model, "_name_or_path") or type(model).__name__)
