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
# lens_mix shows, for a model in TransformerLens, which token's information went into which token's
# representation, layer by layer. Run this file (`python demos/tour.py`), or open it as a notebook
# (`jupytext --to notebook demos/tour.py`).
#
# The numbers in the text are those of SmolLM2-135M on TransformerLens 4.3. To use a model of your own, set
# `LENS_MIX_MODEL` to its hub name or folder.

# %%
import tempfile
from pathlib import Path

import models
import torch

import lens_mix as lm
from lens_mix.hooks import zero_values
from lens_mix.view import token_bars

# %% [markdown]
# ## A model
# `demo_model()` is `TransformerBridge.boot_transformers(...)` for a model that needs no hub. Everything below
# works with a `HookedTransformer` too.

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
print(f"the model predicts {model.tokenizer.decode([answer])!r}, probability {clean[answer].exp():.2f}")

# %% [markdown]
# ## Is the model supported?
# A hook name does not mean the same tensor on every model. In the first pass lens_mix therefore rebuilds
# every block from its components and compares. `check` prints this verification, and `support` prints which
# methods can be used.

# %%
print(lm.check(model, prompt))

# %%
print(lm.support(model))

# %% [markdown]
# ## One map
# A `MixingMap` contains `scores[layer, query, key]`: how much position *query* used position *key*. Raw
# scores are as the method defines them; `normalized()` scales each row to sum 1. A notebook shows a map as a
# picture of one position, with what the model predicts there (`explanation()`).

# %%
zeroing = lm.run(model, prompt, "value_zeroing")
print(zeroing)
zeroing

# %%
for source in zeroing.normalized().top(3):
    print(f"  last layer, last position: {source.token!r} at {source.position}: {source.score:.2f}")

# %% [markdown]
# ## Several methods, one clean pass
# The picture has a row per layer and a column per token: what the *last* position used in each layer. The
# shares of the first token and of the position itself are numbers beside each layer, because the first token
# has most of the attention. Value zeroing measures how much the output of the block changes when a token's
# value vector is zeroed. In layer 23 the score of " Italy", 29 tokens before the end, is 0.94 by value
# zeroing and 0.19 by attention.

# %%
maps = lm.run(model, prompt, ["attention", "value_zeroing"])
lm.show_position(maps)

# %% [markdown]
# Which source is the strongest, apart from the first token and the neighbors?

# %%
shares = maps["value_zeroing"].normalized().scores[:, -1]
far = shares[:, 1:-5]
layer, position = divmod(int(far.argmax()), far.shape[1])
position += 1
token = maps["value_zeroing"].tokens[position]
print(f"layer {layer}, position {position}, {token!r}: {shares[layer, position]:.2f} by value zeroing,")
print(f"  {maps['attention'].scores[layer, -1, position]:.2f} by attention")

# %% [markdown]
# ## An experiment of your own, with the same hooks
# The methods use small hook functions, which also work in your own `run_with_hooks`. Does the prediction
# depend on that token's value vector in that layer? This cell zeroes each token's value vector there, one
# after another. The log probability of the prediction changes by −2.35 without " Italy", and by at most 0.05
# for every other token.

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
# ## Input maps
# These are maps of one layer each. Which tokens of the *input* a position used is another question, with a
# course of its own: `docs/courses/rollout_and_flow.py`.

# %% [markdown]
# ## Words, tables, files
# Every method of a map returns a new map. Pieces can be merged into words, and a map can be converted to
# pandas or networkx, or saved to a file that can be loaded again.

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
# `run_many` pads prompts into batches and removes the padding again: each map is the one of its prompt alone.

# %%
prompts = ["She was born in Italy and", "He was born in Japan", "They live in"]
for mixing_map in lm.run_many(model, prompts, "value_zeroing", batch_size=2):
    best = mixing_map.normalized().top(2)
    print(mixing_map.tokens[-1], "used", ", ".join(f"{source.token!r} {source.score:.2f}" for source in best))

# %% [markdown]
# ## What did the model write, and where did it come from?
# The maps above explain the next word. `lm.trace` explains a text that a model wrote, by the sentences of its
# prompt. A score is an estimate, so `verify` deletes each sentence and measures what the words lose. "Oslo"
# needs one sentence: without it, it loses 9.34 nats. "Norway" is in no document. It loses nothing without
# that sentence (−0.10 nats): the model adds it itself. `trace.show()` is a page on which a click on any words
# shows their sources.

# %%
documents = {
    "annual report": "The company was founded in 1998. It has 120 employees. Its main office is in Oslo.",
    "press release": "The new phone has a battery that lasts three days. It will be sold from May.",
}
prompt = lm.Documents(documents, question="Where is the main office of the company?")
written = "The main office of the company is located in Oslo, Norway."
trace = lm.trace(model, prompt, answer=written)
print(trace["Oslo"].verify(3))
print(trace["Norway"].verify(3))

# %% [markdown]
# With `generate=64` instead of `answer=`, the model writes the text itself.

# %%
print(lm.trace(model, prompt, generate=16).text)

# %% [markdown]
# ## How to cite a method

# %%
print(lm.citation("value_zeroing"))
