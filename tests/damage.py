"""Damage files, always in the same ways, to test what reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

OTHERS = {
    "empty": b"",
    "text": b"hello\n",
    "json": b"{}",
    "list": b"[1, 2]",
    "zeros": bytes(4096),
    "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "parquet": b"PAR1" + bytes(50) + b"PAR1",
    "header": b"\x10" + bytes(7) + b'{"a":"b"}       ',
}
WRONG: tuple[Any, ...] = (None, 3, -1, 1.5, True, "x", [], {}, [[1]], {"a": 1}, float("nan"), 10**30)


def damage_bytes(content: bytes, seed: int = 0, count: int = 60) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents: cut, with other bytes, pieces removed, swapped or doubled; other files."""
    draw = random.Random(seed)
    yield from OTHERS.items()
    for number in range(count):
        place, length = draw.randrange(len(content)), draw.randrange(1, 40)
        end = place + length
        kind = ("cut", "flip", "bit", "remove", "zero", "double", "append", "swap")[number % 8]
        if kind == "cut":
            changed = content[:place]
        elif kind == "flip":
            changed = (
                content[:place] + bytes([content[place] ^ draw.randrange(1, 256)]) + content[place + 1 :]
            )
        elif kind == "bit":
            # The last half of a file is numbers in some formats, and the first half text in others.
            changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        elif kind == "remove":
            changed = content[:place] + content[end:]
        elif kind == "zero":
            changed = content[:place] + bytes(len(content[place:end])) + content[end:]
        elif kind == "double":
            changed = content[:end] + content[place:]
        elif kind == "append":
            changed = content + draw.randbytes(length)
        else:
            changed = content[end:] + content[:end]
        if changed != content:
            yield f"{kind} {place} {length}", changed


def damage_json(value: Any, seed: int = 0, count: int = 60) -> Iterator[tuple[str, Any]]:
    """Yield names and values: without a key, with another type, with a longer or shorter list."""
    draw = random.Random(seed)
    for number in range(count):
        changed = json.loads(json.dumps(value))
        path, inner = [], changed
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            key = draw.choice(keys)
            path.append(str(key))
            if isinstance(inner[key], (dict, list)) and inner[key] and draw.random() < 0.6:
                inner = inner[key]
                continue
            break
        kind = ("drop", "type", "repeat")[number % 3]
        if kind == "drop":
            del inner[key]
        elif kind == "repeat" and isinstance(inner[key], list) and inner[key]:
            inner[key] = [*inner[key], inner[key][-1]]
        else:
            inner[key] = draw.choice(WRONG)
        if json.dumps(changed) != json.dumps(value):
            yield f"{kind} {'.'.join(path)}", changed


def damage_tensors(path: Path, out: Path, seed: int = 0) -> Iterator[str]:
    """Write a file of `path` with another record or other tensors to `out`, and yield what is wrong."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    for name, record in damage_json(json.loads(metadata["record"]), seed):
        for kept in (metadata, {key: metadata[key] for key in ("format", "record")}):
            save_file(tensors, out, metadata={**kept, "record": json.dumps(record)})
            yield f"{name}{'' if kept is metadata else ', no digest'}"
    for name, tensor in tensors.items():
        for what, changed in (
            ("dropped", None),
            ("shorter", tensor[:-1].clone()),
            ("more axes", tensor[None].clone()),
            ("other type", tensor.to(torch.int32)),
            ("not a number", torch.full_like(tensor.float(), float("nan"))),
        ):
            others = {key: value for key, value in tensors.items() if key != name}
            save_file({**others, **({} if changed is None else {name: changed})}, out, metadata=metadata)
            yield f"{name} {what}"
