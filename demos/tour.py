# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A tour of lens_mix
#
# You have a model in TransformerLens and want to know which token's information went into which token's
# representation, layer by layer. Run this file as it is (`python demos/tour.py`), or open it as a notebook
# (`jupytext --to notebook demos/tour.py`).
#
# The numbers in the text are those of SmolLM2-135M on TransformerLens 4.3. To take the tour with a model of
# your own, set `LENS_MIX_MODEL` to its hub name or folder.

# %%
import tempfile
from pathlib import Path

import models
import torch

import lens_mix as lm
from lens_mix.hooks import zero_values
from lens_mix.view import query_maps, token_bars

# %% [markdown]
# ## A model, as always
# `demo_model()` is `TransformerBridge.boot_transformers(...)` for a model that needs no hub. A
# `HookedTransformer` goes into everything below just the same.

# %%
model = models.demo_model()
prompt = (
    "My grandmother was born in Italy. She left the country with her three children after the war, but all "
    "her life she cooked the food of her home and sang to us in"
)

# %%
with torch.no_grad():
    clean = model(model.to_tokens(prompt))[0, -1].log_softmax(-1)
answer = int(clean.argmax())
print(f"goes on with {model.tokenizer.decode([answer])!r}, probability {clean[answer].exp():.2f}")

# %% [markdown]
# ## Can it be trusted here?
# Hook names do not mean the same on every model. On the first pass lens_mix rebuilds every block from the
# parts that it thinks are there and compares; `check` prints the verification, `support` what follows from it.

# %%
print(lm.check(model, prompt))

# %%
print(lm.support(model))

# %% [markdown]
# ## One line
# A `MixingMap` holds `scores[layer, query, key]`: how much position *query* used position *key*. Raw scores
# are as the method defines them; `normalized()` makes each row sum to 1.

# %%
zeroing = lm.run(model, prompt, "value_zeroing")
print(zeroing)
for source in zeroing.normalized().top(3):
    print(f"  last layer, last position: {source.token!r} at {source.position}: {source.score:.2f}")

# %% [markdown]
# ## Several methods, one clean pass
# A row per layer, a column per token: what the *last* position used in each layer. Attention puts most of
# its weight on the first token. Value zeroing measures how much the output of the block changes when a
# token's value vector is missing. In layer 23 it has 0.94 for " Italy", 29 tokens back, where attention has
# 0.19.

# %%
maps = lm.run(model, prompt, ["attention", "value_zeroing"])
query_maps(maps)

# %% [markdown]
# Where is the strongest source that is neither the first token nor a neighbour?

# %%
shares = maps["value_zeroing"].normalized().scores[:, -1]
far = shares[:, 1:-5]
layer, position = divmod(int(far.argmax()), far.shape[1])
position += 1
token = maps["value_zeroing"].tokens[position]
print(f"layer {layer}, position {position}, {token!r}: {shares[layer, position]:.2f} by value zeroing,")
print(f"  {maps['attention'].scores[layer, -1, position]:.2f} by attention")

# %% [markdown]
# ## Your own experiment, with the same hooks
# The methods are made of small hook functions that work on their own in `run_with_hooks`. Does the answer
# depend on what that token passes on in that layer? Zero each token's value vector there in turn, and see
# what becomes of the answer's log probability: −2.35 without " Italy", 0.05 at most otherwise.

# %%
tokens = model.to_tokens(prompt)
changes = []
for zeroed in range(tokens.shape[1]):
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=[zero_values(layer, zeroed)])
    changes.append(float(logits[0, -1].log_softmax(-1)[answer] - clean[answer]))

ranked = sorted(range(len(changes)), key=lambda place: changes[place])
for place in ranked[:3]:
    print(f"  without {maps['attention'].tokens[place]!r} at {place}: {changes[place]:+.2f}")

# %%
token_bars(
    {
        f"attention, layer {layer}": maps["attention"].scores[layer, -1],
        f"value zeroing, layer {layer}": shares[layer],
        "change of the answer's log probability": torch.tensor(changes),
    },
    maps["attention"].tokens,
)

# %% [markdown]
# ## Down to the input
# Rollout multiplies the layers' maps. On a causal model it drifts to the first token, whatever the layers
# say; `receptive_field=True` divides by what even attention would give (docs/receptive_field.md has the
# derivation and its limits). Through thirty layers neither finds " Italy": compare such rows with the maps
# per layer.

# %%
rows = {
    "rollout": lm.rollout(maps["value_zeroing"]),
    "rollout, receptive field": lm.rollout(maps["value_zeroing"], receptive_field=True),
    "rollout, first token dropped, receptive field": lm.rollout(
        maps["value_zeroing"], drop_bos=True, receptive_field=True
    ),
}
token_bars(rows, maps["value_zeroing"].tokens, title="value zeroing, down to the input")

# %% [markdown]
# ## Words, tables, files
# Every method of the record gives a new one. Pieces can be merged into words, and a map goes into pandas,
# networkx, or a file that holds everything needed to read it again.

# %%
words = zeroing.normalized().merge_words()
print(f"{len(zeroing.tokens)} tokens, {len(words.tokens)} words")
table = words.to_dataframe()
last = table[(table["layer"] == layer) & (table["query"] == len(words.tokens) - 1)]
print(last.nlargest(3, "score").to_string(index=False))

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "italy.safetensors"
    zeroing.save(file)
    again = lm.MixingMap.load(file)
print(torch.equal(again.scores, zeroing.scores), again.provenance["transformer_lens"])

# %% [markdown]
# ## Many prompts
# `run_many` batches, pads and unpads: each prompt gets the map that it gets alone.

# %%
prompts = ["She was born in Italy and", "He was born in Japan", "They live in"]
for mixing_map in lm.run_many(model, prompts, "value_zeroing", batch_size=2):
    best = mixing_map.normalized().top(2)
    print(mixing_map.tokens[-1], "used", ", ".join(f"{source.token!r} {source.score:.2f}" for source in best))

# %% [markdown]
# ## Whose idea was it?

# %%
print(lm.citation("value_zeroing"))
