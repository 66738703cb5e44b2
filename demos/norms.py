"""Compute mixing ratios and the cancel effect of an encoder, as in the papers, and of a decoder.

    python demos/norms.py                      all-MiniLM-L6-v2 and SmolLM2-135M (downloaded once, 177 MB)
    python demos/norms.py --encoder NAME       another encoder, by hub name or folder; --decoder likewise
    python demos/norms.py --folding            only how fold_value_biases changes the encoder's maps

The program prints the mean mixing ratio per layer and stage, from the attention weights to the whole block,
the same by kind of token, and the tokens that get attention but have short vectors. It draws both.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models

import lens_mix as lm
from lens_mix.experiments import cancel_effect, mixing_ratio, norm_figures
from lens_mix.view.labels import make_visible

if TYPE_CHECKING:
    import pandas

OUTPUTS = Path(__file__).resolve().parent.parent / "outputs"
LAYER_MAPS = ("value_norm", "attn_res", "attn_res_ln", "atb_ff", "atb_ff_res_ln", "globenc", "alti")
SENTENCES = [
    "The cat sat on the mat, and the dog slept by the door.",
    "Paris is the capital of France; Rome is the capital of Italy.",
    "She gave him the book that her sister had written.",
    "After the storm, the fishermen repaired their nets.",
    "Few people know how much water a tree drinks in a day.",
    "The committee has not decided whether the plan will go ahead.",
]


def main() -> None:
    """Read the options and report on both models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--encoder", help="an encoder's hub name or folder; default: all-MiniLM-L6-v2")
    parser.add_argument("--decoder", help="a decoder's hub name or folder; default: SmolLM2-135M")
    parser.add_argument("--outputs", type=Path, default=OUTPUTS, help="folder of the pictures")
    parser.add_argument("--folding", action="store_true", help="measure fold_value_biases on the encoder")
    options = parser.parse_args()
    if options.folding:
        print(measure_folding(models.load(options.encoder) if options.encoder else models.minilm()))
        return
    options.outputs.mkdir(parents=True, exist_ok=True)
    written = []
    for chosen, name, default in (
        (options.encoder, "all-MiniLM-L6-v2", models.minilm),
        (options.decoder, "SmolLM2-135M", models.smollm2),
    ):
        try:
            model = models.load(chosen) if chosen else default()
        except ImportError as problem:
            print(f"{name} is left out: {problem}")
            continue
        written += report(Path(chosen).name if chosen else name, model, options.outputs)
    print("\nWritten:", *written, sep="\n  ")


def report(name: str, model: Any, folder: Path) -> list[Path]:
    """Print the tables and the findings of one model, draw them, and return the files."""
    ratios = mixing_ratio.mixing_ratios(model, list(SENTENCES))
    lengths = cancel_effect.weights_and_norms(model, list(SENTENCES))
    layers, tokens = mixing_ratio.by_layer(ratios), cancel_effect.cancelled_tokens(lengths)
    count = ratios.groupby("prompt")["position"].nunique().sum()
    print(f"\n=== {name}, {len(SENTENCES)} sentences, {count} tokens")
    for title, table in {
        "mixing ratio by layer": layers,
        "mixing ratio by kind of token": mixing_ratio.by_kind(ratios),
        "attention weight and length ‖f(x)‖ by kind of token": lengths_by_kind(lengths),
        "tokens with the largest cancel effect": tokens,
    }.items():
        print(f"\n{title}\n{table.to_string(float_format=lambda number: f'{number:.3f}')}")
    print(f"\n{describe_findings(layers, tokens, cancel_effect.correlations(lengths)['spearman'])}")
    return draw(name, ratios, lengths, folder)


def lengths_by_kind(lengths: pandas.DataFrame) -> pandas.DataFrame:
    """Return the no-op table over all layers together."""
    return cancel_effect.no_op_table(lengths.assign(layer="all")).loc["all"]


def describe_findings(layers: pandas.DataFrame, tokens: pandas.DataFrame, correlations: pandas.Series) -> str:
    """Return whether the two findings of the papers are true of this model, with the numbers."""
    means, first = layers.loc["mean"].map("{:.2f}".format), tokens.iloc[0]
    falls = "falls" if layers.loc["mean", "attn_res_ln"] < layers.loc["mean", "attn_w"] else "does not fall"
    shorter = "shorter" if first["norm"] < first["others_norm"] else "not shorter"
    low, high = correlations.idxmin(), correlations.idxmax()
    return "\n".join(
        (
            f"Mean mixing ratio {falls} from {means['attn_w']} by attention weights (AttnW) to",
            f"  {means['attn_n']} by vectors (AttnN), {means['attn_res']} with the residual (AttnRes), "
            f"{means['attn_res_ln']} after the norm (AttnResLn).",
            f"Cancel effect: {make_visible(first['token'])} gets {first['weight']:.0%} of the attention "
            f"in layer {first['layer']},",
            f"  where its vectors are {shorter} than the others': mean length {first['norm']:.2f} against "
            f"{first['others_norm']:.2f}.",
            f"Spearman correlation of weight and length: {correlations.mean():.2f}, mean over the layers,",
            f"  from {correlations[low]:.2f} (layer {low}) to {correlations[high]:.2f} (layer {high}).",
        )
    )


def draw(name: str, ratios: pandas.DataFrame, lengths: pandas.DataFrame, folder: Path) -> list[Path]:
    """Draw both pictures of one model, and return their paths."""
    slug = name.lower().replace(" ", "_")
    pictures = {
        "mixing": norm_figures.mixing_by_layer(ratios, f"Mixing ratio by layer, {name}"),
        "cancel": norm_figures.weights_against_norms(
            lengths, title=f"Attention weight and vector length, {name}"
        ),
    }
    written = []
    for suffix, picture in pictures.items():
        written.append(folder / f"norms_{slug}_{suffix}.png")
        picture.savefig(written[-1])
    return written


def measure_folding(model: Any) -> str:
    """Return tables of how the maps change when TransformerLens folds b_V into b_O, and does nothing else."""
    before, maps = measure(model)
    model.enable_compatibility_mode(
        disable_warnings=True, fold_ln=False, center_writing_weights=False, center_unembed=False
    )
    after, folded = measure(model)
    means = before.loc[["mean"]].rename(index={"mean": "b_V in the values"})
    means.loc["b_V folded"] = after.loc["mean"]
    means.loc["largest change of a layer"] = (after - before).drop(index="mean").abs().max()
    rows = {name: describe_change(maps[name], folded[name]) for name in LAYER_MAPS}
    table = means.to_string(float_format="{:.4f}".format)
    return (
        f"\nmean mixing ratio, {len(SENTENCES)} sentences\n{table}\n\n"
        "largest change of a map entry, rows summing to 1: layer, query <- key, before -> after\n"
        + "\n".join(f"{name:<14}  {row}" for name, row in rows.items())
    )


def measure(model: Any) -> tuple[pandas.DataFrame, dict[str, list[lm.MixingMap]]]:
    """Return the mean mixing ratios, and every map of every sentence with rows that sum to 1."""
    maps = [lm.run(model, sentence, LAYER_MAPS) for sentence in SENTENCES]
    ratios = mixing_ratio.by_layer(mixing_ratio.mixing_ratios(model, list(SENTENCES)))
    return ratios, {name: [found[name].normalized() for found in maps] for name in LAYER_MAPS}


def describe_change(before: list[lm.MixingMap], after: list[lm.MixingMap]) -> str:
    """Return the entry that changed most in all sentences, with its values before and after."""
    changes = [(new.scores - old.scores).abs() for old, new in zip(before, after, strict=True)]
    worst = max(range(len(changes)), key=lambda index: float(changes[index].max()))
    old, new = before[worst], after[worst]
    layer, query, key = (changes[worst] == changes[worst].max()).nonzero()[0].tolist()
    return (
        f"{float(changes[worst].max()):.4f}  layer {layer}, {old.tokens[query]} <- {old.tokens[key]}: "
        f"{float(old.scores[layer, query, key]):.4f} -> {float(new.scores[layer, query, key]):.4f}"
    )


if __name__ == "__main__":
    main()
