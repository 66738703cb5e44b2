"""Nothing in the tests reaches a model hub, and tiny tensors run on one thread."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

import tests.shape_checks  # noqa: F401  the type checker that pyproject.toml names has to be importable

torch.set_num_threads(1)
