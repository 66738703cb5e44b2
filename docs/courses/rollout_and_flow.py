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
# # Attention rollout and attention flow
#
# **Level:** you know what attention weights are and can read numpy. **Time:** 60 minutes with the exercises.
# **Paper:** Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020.
#
# An attention map compares the *positions* of one layer. A reader wants to know about the *input tokens*. The
# paper proposes two ways to get from the first to the second: rollout and flow. In this course you will
#
# 1. see why the map of a layer is not a map of the input,
# 2. compute rollout in three lines and flow with networkx, and find the numbers of lens_mix,
# 3. measure how well both predict what the model does, on an encoder of six layers,
# 4. see both fail on a decoder of thirty layers, and learn why and what helps.

# %% [markdown]
# ## Two models
#
# The next cell loads the models from packages, so that it needs no model hub. It works in the folder of the
# repository. If you have access to a hub, load the same encoder with
# `TransformerBridge.boot_transformers("sentence-transformers/all-MiniLM-L6-v2")`, and the decoder, with
# weights that are not quantised, with
# `TransformerBridge.boot_transformers("HuggingFaceTB/SmolLM2-135M-Instruct")`.

# %%
import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import pandas as pd
import torch
from demos import models

import lens_mix as lm
from lens_mix.evaluation import partial_spearman, spearman
from lens_mix.graphs import layered_graph
from lens_mix.view import STYLE, information_flow, layer_maps, token_bars

plt.style.use(STYLE)
encoder = models.minilm()
decoder = models.demo_model()

# %% [markdown]
# ## Attention weights, layer by layer
#
# Row *i* of a map says from which positions position *i* read, in this layer. The heads of a layer are
# averaged, as in the paper.

# %%
sentence = "The author talked to Sara about her book."
attention = lm.run(encoder, sentence, "attention").merge_heads()
layer_maps(attention, columns=3)

# %% [markdown]
# The rows of the first layers are mostly spread evenly or stay close to the position. In later layers, nearly
# every row is directed at `[CLS]`, `[SEP]` or the full stop. Does the model then forget what the sentence
# says? It does not: the next section shows what the map of a late layer is a map of.

# %% [markdown]
# ## Why is a layer map not an input map?
#
# We replace one word of the sentence by `[MASK]`, and measure for each layer how much the vector at each
# position changes: 1 minus the cosine of the vectors with and without the word.


# %%
def layer_outputs(tokens):
    """Return the output of each layer, [layer, example, position, d_model]."""
    with torch.no_grad():
        _, cache = encoder.run_with_cache(tokens)
    return torch.stack([cache[f"blocks.{layer}.hook_out"] for layer in range(encoder.cfg.n_layers)])


def measure_changes(text):
    """Return how much each position changes without each word, [layer, position, word]."""
    tokens = encoder.to_tokens(text)
    words = range(1, tokens.shape[1] - 1)  # All positions but [CLS] and [SEP].
    copies = tokens.repeat(len(words), 1)
    for copy, word in enumerate(words):
        copies[copy, word] = encoder.tokenizer.mask_token_id
    cosine = torch.nn.functional.cosine_similarity(layer_outputs(copies), layer_outputs(tokens), dim=-1)
    return (1 - cosine).transpose(1, 2)


changes = measure_changes(sentence)
sara = attention.tokens.index("sara")
token_bars(
    {f"layer {layer}": changes[layer, :, sara - 1] for layer in range(len(changes))},
    attention.tokens,
    title="Change of each position without “sara”",
)

# %% [markdown]
# In the first layer, the word's own position changes most by far. In the last layer, many other positions have
# changed too: they contain information about "sara". A row of a late layer that is directed at `[SEP]`
# therefore reads what *position* `[SEP]` contains by then, which is more than the token `[SEP]`. Two steps
# are missing: what the layers below have mixed, and the residual stream, which carries each position's
# own vector past the attention.

# %% [markdown]
# ## Rollout: multiply the layers
#
# A token reaches a position of the last layer along paths, one position per layer. The weight of a path is
# the product of the weights along it, and rollout adds the weights of all paths. The sum over all paths of
# products is a product of matrices. The residual stream is an identity matrix that counts as much as the
# attention: Â = 0.5 A + 0.5 I.

# %%
A = attention.scores.double().numpy()
identity = np.eye(A.shape[-1])

by_hand = identity
for layer in A:
    by_hand = (0.5 * layer + 0.5 * identity) @ by_hand

rolled = lm.rollout(attention)
print("largest difference from lm.rollout:", np.abs(by_hand - rolled.scores[-1].numpy()).max())

# %%
layer_maps(rolled, columns=3)

# %% [markdown]
# The diagonal stays visible in every layer, unlike in the attention maps. The column of `[CLS]` gets darker
# from layer to layer. Keep this in mind: it is harmless here, and it is the whole picture in a deep decoder.

# %% [markdown]
# ## Flow: the narrowest edge decides
#
# Flow reads the same weights as the capacities of pipes. The score of a position and an input token is the
# largest amount that can flow between them. On one path, the narrowest edge decides, where rollout takes the
# product. Paths that share an edge share its capacity. Two layers of three positions are enough to see this.

# %%
toy = lm.MixingMap(
    scores=torch.tensor(
        [
            [[0.8, 0.1, 0.1], [0.6, 0.2, 0.2], [0.1, 0.1, 0.8]],
            [[0.2, 0.6, 0.2], [0.3, 0.4, 0.3], [0.5, 0.4, 0.1]],
        ],
        dtype=torch.float64,
    ),
    tokens=["the", "cat", "sat"],
    method="attention",
    causal=False,
)
graph = layered_graph(toy)
information_flow(graph, by="capacity", title="Capacities: half attention, half residual")

# %% [markdown]
# networkx computes the largest flow of each pair. `normalize=False` gives the flows of the library before each
# row is divided by its sum.

# %%
flows = np.zeros((3, 3))
for query in range(3):
    for key in range(3):
        flows[query, key] = nx.maximum_flow_value(graph, (2, query), (0, key))

print(pd.DataFrame(flows, index=toy.tokens, columns=toy.tokens))
library = lm.flow(toy, layer=-1, normalize=False).scores[0].numpy()
print("largest difference from lm.flow:", np.abs(flows - library).max())

# %% [markdown]
# And the row of `[CLS]` in the encoder, by the three maps:

# %%
flowed = lm.flow(attention)
token_bars({"attention, last layer": attention, "rollout": rolled, "flow": flowed}, attention.tokens, query=0)

# %% [markdown]
# Flow gives nearly the same score to all tokens. The reason is in the record of the map: the share of pairs
# whose flow equals what the *first* layer alone lets through.

# %%
for label, share in zip(flowed.layer_labels, flowed.provenance["aggregation"]["first_layer_share"]):
    print(
        f"layer {label}:",
        "-" if share is None else f"{share:.2f} of the pairs are at the first layer's bound",
    )

# %% [markdown]
# With several layers there is nearly always a way around a narrow edge. Only the first layer cannot be
# avoided, because a token has one column of edges there. The deeper the model, the less flow depends on its
# upper layers.

# %% [markdown]
# ## The residual weight
#
# Rollout has one parameter that the attention does not contain: how much of a vector is carried past the
# attention. The paper takes one half. The next cell prints how much of each word's last vector is attributed
# to the word itself, for other weights.

# %%
words = slice(1, -1)
for residual in (0.0, 0.25, 0.5, 0.75, 0.9):
    scores = lm.rollout(attention, residual=residual).scores[-1]
    print(
        f"residual weight {residual:.2f}: own share of a word {scores.diagonal()[words].mean():.2f}, "
        f"share of [CLS] {scores[words, 0].mean():.2f}"
    )

# %% [markdown]
# The result depends on the weight more than on anything else, so a weight should not be a guess. lens_mix can
# measure it: `residual_shares=True` records how long the residual vector of each position is beside what
# attention adds to it, and `residual="measured"` uses these weights.

# %%
measured = lm.run(encoder, sentence, "attention", residual_shares=True).merge_heads()
print("measured weight, mean over positions, by layer:", measured.residual_shares.mean(-1))

# %% [markdown]
# ## Does it predict what the model does?
#
# We already have the answer key: `measure_changes` says how much each position of each layer changes without
# each word. For each position and layer we rank the other words by the map and by the measured change, and
# compare the ranks (Spearman; 1 is the same order, 0 is no relation). The paper makes the same comparison
# and calls it blank-out.

# %%
SENTENCES = [
    sentence,
    "The cat sat on the mat, and the dog slept by the door.",
    "After the storm, the fishermen repaired their nets.",
    "The committee has not decided whether the plan will go ahead.",
    "My grandmother was born in Italy and cooked the food of her home.",
]


def agreement(scores, changes):
    """Return the mean rank correlation of the rows of a map [layer, query, key] and the changes, by layer."""
    last = scores.shape[-1] - 1
    result = []
    for layer in range(len(scores)):
        rows = []
        for query in range(1, last):
            others = [key for key in range(1, last) if key != query]
            measured = changes[layer, query, [key - 1 for key in others]]
            rows.append(spearman(scores[layer, query, others], measured))
        result.append(np.mean(rows))
    return result


found = {}
for text in SENTENCES:
    maps = lm.run(encoder, text, ["attention", "attn_res_ln"], residual_shares=True)
    truth = measure_changes(text)
    candidates = {
        "attention": maps["attention"].merge_heads(),
        "attention, rollout": lm.rollout(maps["attention"]),
        "attention, flow": lm.flow(maps["attention"]),
        "attention, rollout, weight measured": lm.rollout(maps["attention"], residual="measured"),
        "attn_res_ln, rollout": lm.rollout(maps["attn_res_ln"]),
    }
    for name, mixing_map in candidates.items():
        found.setdefault(name, []).append(agreement(mixing_map.scores, truth))

table = pd.DataFrame({name: np.mean(rows, axis=0) for name, rows in found.items()})
table.index.name = "layer"
table.round(2)

# %%
axes = table.plot(figsize=(7.5, 3.6), marker="o")
axes.set_ylabel("rank correlation with the\nmeasured change")
axes.set_title("Words of five sentences, all-MiniLM-L6-v2", loc="left")
axes.legend(loc="lower left", fontsize=8)
plt.show()

# %% [markdown]
# Four things to read off the picture:
#
# - In the first layer, positions still are tokens, and the maps of attention have the same rows.
# - In the middle of the model, rollout agrees better than the attention of the layer itself. This is the
#   paper's result.
# - Flow is lower than rollout from the second layer on.
# - In the last layer the rollout of attention weights falls. The rollout of `attn_res_ln`, a map that contains
#   the residual stream as it is in this model, does not.
#
# [The course on norms](norms.md) explains `attn_res_ln`.

# %% [markdown]
# ## Thirty layers and a causal mask
#
# The decoder has five times as many layers, and no position can see the ones after it.

# %%
prompt = "My grandmother was born in Italy. All her life she cooked the food of her home and sang to us in"
maps = lm.run(decoder, prompt, ["attention", "value_zeroing"], residual_shares=True)
lm.show_position(maps)

# %% [markdown]
# The layer maps differ from layer to layer, and one of the last layers of Value Zeroing points at " Italy".
# Now the rollout of the same maps, at several depths:

# %%
rolled = lm.rollout(maps["attention"])
token_bars(
    {f"rollout, {layer + 1} layers": rolled.scores[layer, -1] for layer in (1, 3, 7, 15, 29)},
    rolled.tokens,
    title="Rollout of attention, last position",
)

# %% [markdown]
# After thirty layers, nearly everything is on the first token. The note in the map's record says so too. The
# reason is not that the model attends to the first token. Maps of *even* attention, which prefer nothing,
# have the same result:

# %%
tokens = rolled.tokens
even = torch.ones(30, len(tokens), len(tokens), dtype=torch.float64).tril()
even = lm.MixingMap(even / even.sum(-1, keepdim=True), tokens, "attention", causal=True)
for depth in (1, 4, 12, 30):
    print(
        f"even attention, {depth} layers: {lm.rollout(even).scores[depth - 1, -1, 0]:.3f} on the first token"
    )
print(maps["attention"].method, "of the decoder:", f"{rolled.scores[-1, -1, 0]:.3f}")
for note in rolled.notes:
    print("note:", note)

# %% [markdown]
# The first token is visible to every position, and the last token to one. Many more paths end at the early
# tokens, and rollout counts paths. The paper remarks that for causal models the result should be normalised
# by the receptive field, and gives no formula. Two repairs follow.

# %% [markdown]
# ## What helps: less mixing
#
# With weight one half, thirty layers replace a vector's content thirty times. In a real model the residual
# stream is long, and each block adds little. Two options of `rollout` use this: `residual="measured"`, and
# `total_mixing=t`, which chooses the weight so that the mixing of all layers adds up to t.
#
# ## What helps less: division by the receptive field
#
# `receptive_field=True` divides by the rollout of even attention under the same mask. Even attention then has
# an even result. [The page on the receptive field](../evidence/receptive_field.md) derives the formula.

# %%
zeroing = maps["value_zeroing"]
token_bars(
    {
        "rollout": lm.rollout(zeroing),
        "receptive field": lm.rollout(zeroing, receptive_field=True),
        "weight measured": lm.rollout(zeroing, residual="measured"),
        "total mixing 1.5": lm.rollout(zeroing, total_mixing=1.5),
    },
    zeroing.tokens,
    title="Value Zeroing, last position",
)

# %% [markdown]
# ## Which one agrees with the model?
#
# For a decoder, the answer key is the prediction. Occlusion replaces each token by others, and measures how
# much the log probability of the predicted token changes. In causal models a late token matters more, so the
# position alone already agrees with the measurement. The second column is controlled for position: it says
# what a map knows beyond that.

# %%
PROMPTS = [
    "The Eiffel Tower is in the city of",
    "She was born in Italy and sang to us in",
    "The doctor asked the nurse to bring her",
    "At night the sky is dark and the stars are",
    "He opened the door with his old",
]
rows = []
for text in PROMPTS:
    truth = lm.run(decoder, text, lm.Occlusion(measure="absolute"), queries=-1).scores[0, 0, 1:]
    layer = lm.run(decoder, text, ["attention", "value_zeroing"], residual_shares=True)
    last_rows = {"position alone": torch.arange(len(truth))}
    for name, one in layer.items():
        one = one.merge_heads() if one.has_heads else one
        last_rows[f"{name}, last layer"] = one.scores[-1, -1, 1:]
        last_rows[f"{name}, rollout"] = lm.rollout(one).scores[-1, -1, 1:]
        last_rows[f"{name}, flow"] = lm.flow(one, layer=-1, queries=-1).scores[0, 0, 1:]
        last_rows[f"{name}, rollout, receptive field"] = lm.rollout(one, receptive_field=True).scores[
            -1, -1, 1:
        ]
        last_rows[f"{name}, rollout, weight measured"] = lm.rollout(one, residual="measured").scores[
            -1, -1, 1:
        ]
        last_rows[f"{name}, rollout, total mixing 1.5"] = lm.rollout(one, total_mixing=1.5).scores[-1, -1, 1:]
    for name, row in last_rows.items():
        partial = 0.0 if name == "position alone" else partial_spearman(row, truth)
        rows.append({"map": name, "Spearman": spearman(row, truth), "controlled for position": partial})

pd.DataFrame(rows).groupby("map", sort=False).mean().round(2)

# %% [markdown]
# Rollout orders the tokens the wrong way round, and flow does no better. The receptive field turns the order,
# mostly up to that of the position. With less mixing, the same maps agree with the model beyond the position.
# Five prompts are an illustration. [The evaluation on more than a hundred prompts and two models](../evidence/input_map.md)
# has the same order, and shows that even these rollouts are not the best input maps.

# %% [markdown]
# ## Exercises
#
# 1. **Order.** Matrix products do not commute. Compute the rollout of the encoder in the wrong order (the first
#    layer leftmost). Do rows still sum to 1? Is the result a map from the last layer to the input?
# 2. **One path.** In the toy graph, take the query "sat" and the input "the". List the three paths, with the
#    product and with the smallest weight of each. Which sums are the rollout and the flow?
# 3. **Shuffled weights.** Permute each row of the encoder's attention at random and compute the agreement again.
#    How much of it is left for attention, and how much for its rollout?
# 4. **The bound.** Cut the encoder's maps to the first two layers and compute the flow. Is the first layer still
#    all that counts?
# 5. **Depth.** Find the smallest depth at which the rollout of the decoder has more than nine tenths of the last
#    row on the first token, for the residual weights 0.5, 0.9 and 0.97.
#
# Try them before you read on.

# %% [markdown]
# ## Answers
#
# **1.** Rows sum to 1 in any order, because each matrix has such rows. The sum alone is no check: the result is
# another map, since paths now run through the layers in the wrong order.

# %%
wrong = identity
for layer in A:
    wrong = wrong @ (0.5 * layer + 0.5 * identity)
print("row sums:", wrong.sum(-1).round(6)[:3], " largest difference:", np.abs(wrong - by_hand).max().round(3))

# %% [markdown]
# **2.** The sum of the products is the rollout. The smallest weights add up to the flow here, because the three
# paths share no edge, which is always so in two layers.

# %%
paths = [((2, 2), (1, middle), (0, 0)) for middle in range(3)]
weights = [
    [graph.edges[path[1], path[0]]["weight"], graph.edges[path[2], path[1]]["weight"]]
    if graph.has_edge(path[1], path[0])
    else [graph.edges[path[0], path[1]]["weight"], graph.edges[path[1], path[2]]["weight"]]
    for path in paths
]
for path, pair in zip(paths, weights):
    print(f"through {toy.tokens[path[1][1]]!r}: product {np.prod(pair):.3f}, smallest {min(pair):.3f}")
print(f"sums {sum(np.prod(pair) for pair in weights):.3f} and {sum(map(min, weights)):.3f}")
print(f"rollout {lm.rollout(toy).scores[-1, 2, 0]:.3f}, flow {flows[2, 0]:.3f}")

# %% [markdown]
# **3.** A control of this kind belongs to every evaluation of maps.

# %%
generator = torch.Generator().manual_seed(0)
controls = {"attention": [], "rollout": []}
for text in SENTENCES:
    original = lm.run(encoder, text, "attention").merge_heads()
    order = torch.rand(original.scores.shape, generator=generator).argsort(-1)
    shuffled = original.replace(scores=original.scores.gather(-1, order))
    truth = measure_changes(text)
    controls["attention"].append(agreement(shuffled.scores, truth))
    controls["rollout"].append(agreement(lm.rollout(shuffled).scores, truth))
pd.DataFrame({name: np.mean(values, axis=0) for name, values in controls.items()}).round(2)

# %% [markdown]
# **4.** In two layers each path has its own edges, so the flow is a sum of minima, in which both layers count.

# %%
two = attention.select_layers([0, 1])
minima = np.minimum((0.5 * A[1] + 0.5 * identity)[:, :, None], (0.5 * A[0] + 0.5 * identity)[None]).sum(1)
print("largest difference:", np.abs(lm.flow(two, layer=-1, normalize=False).scores[0].numpy() - minima).max())

# %% [markdown]
# **5.**

# %%
for residual in (0.5, 0.9, 0.97):
    first = lm.rollout(maps["attention"], residual=residual).scores[:, -1, 0]
    deep = [depth + 1 for depth, share in enumerate(first) if share > 0.9]
    print(
        f"residual weight {residual}: {f'{deep[0]} layers' if deep else 'not within thirty layers'}, "
        f"{first[-1]:.2f} after all"
    )
