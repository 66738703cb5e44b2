"""Time other libraries in an environment of their own (`make peers` makes it), which needs other versions.

Each script prints {"seconds": ..., "versions": {...}} as its last line.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".environments" / "peers" / "bin" / "python"


def peer_seconds(script: str, layers: int, positions: int, timeout: float = 900) -> dict[str, float]:
    """Return {name: seconds} of a script of this folder, or {} if its environment or library is missing."""
    name = script.partition("_")[0]
    if not PYTHON.exists():
        return {}
    command = [str(PYTHON), "-m", f"benchmarks.peers.{script}", str(layers), str(positions)]
    command.append(str(torch.get_num_threads()))
    try:
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=True)
        return {name: float(json.loads(out.stdout.splitlines()[-1])["seconds"])}
    except (subprocess.SubprocessError, IndexError, KeyError, ValueError) as problem:
        print(f"{script}: no figure ({str(problem)[:200]})")
        return {}
