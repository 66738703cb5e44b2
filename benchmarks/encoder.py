"""Score maps on an encoder with a trained masked-language head: chemical reactions with one masked token.

    PYTHONPATH=.:demos python -m benchmarks.encoder [prompts]     one table, in outputs/leaderboard/

The only large encoder with such a head that is available without a model hub is a BERT of twelve layers that
reads chemical reactions as SMILES (rxnfp, Schwaller et al., 2021). A token of the product is masked. The
truth is how much the model's own prediction there changes when a token is replaced by one of four drawn ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import lens_mix as lm
from benchmarks.leaderboard import AGGREGATIONS, FOLDER, INPUT_METHODS, LAYER_METHODS
from lens_mix import evaluation

PACKAGE = "rxnfp==0.1.0"
SHA256 = {
    "config.json": "024d89cb6056e146e066ebbcd9d565d6968d53e82953570a8b110b26495d7d4b",
    "pytorch_model.bin": "50a6ed263d33ae759affa82c1e85554cc5ea9f56145f5c7fb39b6c25d4356437",
    "vocab.txt": "399868a653e85549ce150af4a1f6cd2776240c6a3d951ced2120565f00f027fd",
}
# The tokens of SMILES: an atom in brackets, an element, a bond, a ring or an arrow.
TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|[A-Za-z0-9()=#.+\-/\\:~@*$]")
RESIDUES = ("C", "CC", "CCC", "c1ccccc1", "Cc1ccccc1", "c1ccc(Cl)cc1", "c1ccc(F)cc1", "C1CCCCC1", "CCOC")
REACTIONS = (
    "O=C(O){0}.N{1}>>O=C(N{1}){0}",
    "O=C(O){0}.O{1}>>O=C(O{1}){0}",
    "O=S(=O)(Cl){0}.N{1}>>O=S(=O)(N{1}){0}",
    "O=C(Cl){0}.N{1}>>O=C(N{1}){0}",
    "O=C{0}.N{1}>>C(N{1}){0}",
)


@dataclasses.dataclass(frozen=True)
class MaskedImportance(evaluation.Importance):
    """Score whether a map ranks the other tokens by their effect on the prediction at the mask.

    Attributes:
        mask: The number of the mask token.
    """

    mask: int = 0

    def cases(self, model: Any) -> list[evaluation.Case]:
        return [evaluation.Case(prompt, int((prompt == self.mask).nonzero()[0])) for prompt in self.prompts]

    def truth(self, model: Any, case: evaluation.Case, **options: Any) -> Float[Tensor, " key"]:
        row = super().truth(model, case, **options)
        row[case.query] = torch.nan
        return row


def folder() -> Path:
    """Return the model's folder, which is downloaded on the first call."""
    import models

    files = {f"rxnfp/models/transformers/bert_pretrained/{name}": digest for name, digest in SHA256.items()}
    home = models.cache_folder() / "rxnfp-bert-pretrained"
    return models.made_once(home, lambda place: models.download(PACKAGE, "75 MB", files, place))


def load() -> tuple[Any, list[str]]:
    """Return the model as a TransformerBridge, and its vocabulary."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import BertConfig, BertForMaskedLM

    place = folder()
    config = BertConfig.from_pretrained(place, attn_implementation="eager")
    wrapped = BertForMaskedLM(config)
    state = torch.load(place / "pytorch_model.bin", weights_only=True)
    missing = wrapped.load_state_dict(state, strict=False).missing_keys
    assert all("position_ids" in name or "decoder" in name for name in missing), missing
    wrapped.tie_weights()
    wrapped.config.architectures = ["BertForMaskedLM"]
    model = build_bridge_from_module(
        wrapped.eval(), architecture="BertForMaskedLM", hf_config=wrapped.config, tokenizer=None
    )
    return model.eval(), (place / "vocab.txt").read_text().splitlines()


def reactions(vocabulary: list[str], count: int, seed: int = 0) -> list[Tensor]:
    """Return the tokens of reactions, with one token of the product masked."""
    draw = random.Random(seed)
    texts = [
        form.format(first, second)
        for form, first, second in itertools.product(REACTIONS, RESIDUES, RESIDUES)
        if first != second
    ]
    prompts = []
    for text in draw.sample(texts, count):
        tokens = ["[CLS]", *TOKEN.findall(text), "[SEP]"]
        tokens[draw.randrange(tokens.index(">>") + 1, len(tokens) - 1)] = "[MASK]"
        prompts.append(torch.tensor([vocabulary.index(token) for token in tokens]))
    return prompts


def main(count: str = "40") -> None:
    """Run the table as far as it is not finished.

    Args:
        count: The number of prompts.
    """
    torch.set_num_threads(1)
    model, vocabulary = load()
    prompts = reactions(vocabulary, int(count))
    task = MaskedImportance(prompts, leave_out=(0, -1), mask=vocabulary.index("[MASK]"))
    methods = [
        *LAYER_METHODS,
        *(m for m in INPUT_METHODS if not isinstance(m, lm.methods.TokenPatching)),
    ]
    board = lm.evaluate(
        model,
        task,
        methods,
        AGGREGATIONS,
        randomised_model=True,
        resume=FOLDER / "rxnfp-importance.jsonl",
        progress=True,
    )
    (FOLDER / "rxnfp-importance.md").write_text(board.to_markdown("position") + "\n")
    print(board.to_markdown("position"))
    print(f"not defined on this model: {board.refused}")


if __name__ == "__main__":
    main(*sys.argv[1:])
