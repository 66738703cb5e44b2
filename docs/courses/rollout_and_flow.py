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
# Take this course if you have one map for each layer and want one map of the input tokens. You also learn
# when not to use rollout and flow: both fail on the deep decoder of this course.
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
# The next cell loads the models from packages, so it needs no model hub. It uses `demos/models.py`, so a
# downloaded notebook has to be in the folder of the repository. If you have access to a hub, load the same
# encoder with `TransformerBridge.boot_transformers("sentence-transformers/all-MiniLM-L6-v2")`, and the
# decoder, with weights that are not quantised, with
# `TransformerBridge.boot_transformers("HuggingFaceTB/SmolLM2-135M-Instruct")`.

# %%
import warnings

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import pandas as pd
import torch

import lens_mix as lm
from demos import models
from lens_mix.evaluation import partial_spearman, spearman
from lens_mix.graphs import layered_graph
from lens_mix.view import STYLE, information_flow, layer_maps, token_bars

plt.style.use(STYLE)
encoder = models.minilm()
decoder = models.demo_model()

# %% [markdown]
# ## Attention weights, layer by layer
#
# Row *i* of a map shows from which positions position *i* reads in this layer. The heads of a layer are
# averaged, as in the paper.

# %%
sentence = "The author talked to Sara about her book."
attention = lm.run(encoder, sentence, "attention").merge_heads()
layer_maps(attention, columns=3)

# %% [markdown]
# In the first layer, rows are spread over the sentence. From the next layer on, most of nearly every row is
# on `[CLS]`, and little is on the position itself. Do the vectors then lose the information of their words?

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
# No: in every layer, the word's own position changes most by far. The map and the measurement differ for two
# reasons.
#
# - **The residual stream.** Each block adds to a vector and does not replace it. A position keeps what it
#   had, whatever its attention weights are. The map of attention leaves this out.
# - **The layers below.** Layer by layer, other positions change too, first the neighbors, at last most of
#   the sentence. A head that reads the position of "to" in a late layer also reads "sara". The map of the
#   late layer shows the position, and not what has been mixed into it.
#
# An input map has to account for both.

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
# In the first layers the diagonal is visible, unlike in the maps of attention. It fades with every layer, and
# the column of `[CLS]` gets darker: half of each vector is replaced six times. The section on the residual
# weight comes back to this.

# %% [markdown]
# ## Flow: the narrowest edge decides
#
# Flow uses the same weights as capacities, like those of pipes. The score of a position and an input token is
# the largest amount that can flow between them. On one path, the narrowest edge decides, where rollout takes
# the product. Paths that share an edge share its capacity. Two layers of three positions are enough to see
# this.

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
# networkx computes the largest flow of each pair. `normalize=False` gives the flows of the library before
# each row is divided by its sum.

# %%
flows = np.zeros((3, 3))
for query in range(3):
    for key in range(3):
        flows[query, key] = nx.maximum_flow_value(graph, (0, key), (2, query))

print(pd.DataFrame(flows, index=toy.tokens, columns=toy.tokens))
library = lm.flow(toy, layer=-1, normalize=False).scores[0].numpy()
print("largest difference from lm.flow:", np.abs(flows - library).max())

# %% [markdown]
# This is the row of `[CLS]` in the encoder, by the three maps:

# %%
flowed = lm.flow(attention)
token_bars(
    {"attention, last layer": attention, "rollout": rolled, "flow": flowed},
    attention.tokens,
    title="What the position of [CLS] contains, by three maps",
    query=0,
)

# %% [markdown]
# Flow gives nearly the same score to all tokens but `[CLS]`. The record of the map shows why. It has the
# share of pairs whose flow is at a bound of the *first* layer: what leaves the input token there.

# %%
for layer, share in enumerate(flowed.provenance["aggregation"]["first_layer_share"]):
    print(
        f"layer {layer}:",
        "-" if share is None else f"{share:.2f} of the pairs are at the first layer's bound",
    )

# %% [markdown]
# With several layers, other paths nearly always avoid a narrow edge. The first layer cannot be avoided,
# because every path begins with one of its edges. The share grows with depth: the deeper a model is, the less
# its flow depends on the upper layers.

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
# measure it: `residual_shares=True` records how long the residual vector of each position is, compared with
# what attention adds to it, and `residual="measured"` uses these weights.

# %%
measured = lm.run(encoder, sentence, "attention", residual_shares=True).merge_heads()
for layer, weights in enumerate(measured.residual_shares):
    print(f"layer {layer}: measured residual weight {weights.mean():.2f}, mean over the positions")

# %% [markdown]
# ## Does it predict what the model does?
#
# We already have a measurement: `measure_changes` returns how much each position of each layer changes
# without each word. For each position and layer we rank the other words by the map and by the measured
# change, and compare the ranks (Spearman; 1 is the same order, 0 is no relation). The paper makes the same
# comparison and calls it blank-out.

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
# What the picture shows:
#
# - In layers 3 and 4, rollout agrees better than the attention of the layer itself. This is the paper's
#   result.
# - Flow is below rollout from the second layer on.
# - In the last layer, rollout with a weight of one half falls far below the attention. The weight is
#   the cause: with the measured weights, the same maps have the best agreement in nearly every layer.
# - `attn_res_ln` is a map that contains the residual stream as it is in this model. Its rollout needs no
#   weight, and has a high agreement in the last layer too. [The course on norms](norms.ipynb) explains it.

# %% [markdown]
# ## Thirty layers and a causal mask
#
# The decoder has five times as many layers, and no position can see the ones after it.

# %%
prompt = "My grandmother was born in Italy. All her life she cooked the food of her home and sang to us in"
maps = lm.run(decoder, prompt, ["attention", "value_zeroing"], residual_shares=True)
long = maps["attention"]
lm.show_position(maps)

# %% [markdown]
# The maps differ from layer to layer. The heading of the figure names the strongest source: in one late
# layer, nearly the whole row of Value Zeroing is on " Italy", and the model is about to answer " Italian".
# Now the rollout of the attention, at several depths:

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
print("note of the rollout:", rolled.notes[-1])

# %% [markdown]
# The first token is visible to every position, and the last token to one. Many more paths end at the early
# tokens, and rollout counts paths. The paper remarks that for causal models the result should be normalized
# by the receptive field, and gives no formula. Two repairs follow.

# %% [markdown]
# ## What helps: less mixing
#
# With a weight of one half, every layer replaces half of a vector, and after thirty layers nothing of it is
# left. In a real model the residual stream is long, and each block adds little. Two options of `rollout` use
# this: `residual="measured"`, and `total_mixing=t`, which chooses one weight for all layers so that their
# mixing adds up to t.
#
# ## What helps less: division by the receptive field
#
# `receptive_field=True` divides by the rollout of even attention under the same mask. Even attention then has
# an even result. [The evidence](../evidence/aggregation.md) shows whether that helps.

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
# For a decoder, we measure the prediction. Occlusion replaces each token by others, and measures how
# much the log probability of the predicted token changes. In causal models a late token matters more, so the
# position alone already agrees with the measurement. The second column is controlled for position: it
# shows agreement beyond that.

# %%
PROMPTS = [
    "The Eiffel Tower is in the city of",
    "She was born in Italy and sang to us in",
    "The doctor asked the nurse to bring her",
    "At night the sky is dark and the stars are",
    "He opened the door with his old",
    "The farmer sold his milk and cheese at the",
    "My brother broke his leg and went to the",
    "The capital of Japan is",
]
# Each prompt takes some forty short passes, which is meant here.
warnings.filterwarnings("ignore", "occlusion takes")


def compare(row, truth):
    """Return both columns; a row in the exact order of the positions has none beyond the position."""
    partial = partial_spearman(row, truth)
    return {
        "Spearman": spearman(row, truth),
        "controlled for position": 0.0 if np.isnan(partial) else partial,
    }


rows = []
for text in PROMPTS:
    truth = lm.run(decoder, text, lm.methods.Occlusion(measure="absolute"), queries=-1).scores[0, 0, 1:]
    maps = lm.run(decoder, text, ["attention", "value_zeroing"], residual_shares=True)
    rows.append({"map": "position alone", **compare(torch.arange(len(truth)), truth)})
    for name, mixing_map in maps.items():
        mixing_map = mixing_map.merge_heads()
        candidates = {
            "last layer": mixing_map,
            "flow": lm.flow(mixing_map, layer=-1),
            "rollout": lm.rollout(mixing_map),
            "rollout, receptive field": lm.rollout(mixing_map, receptive_field=True),
            "rollout, total mixing 1.5": lm.rollout(mixing_map, total_mixing=1.5),
            "rollout, weight measured": lm.rollout(mixing_map, residual="measured"),
        }
        for aggregation, candidate in candidates.items():
            row = candidate.scores[-1, -1, 1:]
            rows.append({"map": f"{name}, {aggregation}", **compare(row, truth)})

pd.DataFrame(rows).groupby("map", sort=False).mean().round(2)

# %% [markdown]
# Plain rollout and flow order the tokens the wrong way round. The receptive field turns the order, but adds
# nothing beyond the position. With less mixing, the same rollouts agree with the model beyond the position.
# The row of the last layer alone is about as good here.
#
# A few short prompts are an illustration, in which late tokens matter most. [The evaluation on many prompts
# and two models](../evidence/input_map.md) confirms the order, and compares these rollouts with better input
# maps.

# %% [markdown]
# ## Exercises
#
# 1. **Order.** Matrix products do not commute. Compute the rollout of the encoder in the wrong order (the
#    first layer leftmost). Do rows still sum to 1? Is the result a map from the last layer to the input?
# 2. **Paths.** In the toy graph, take the input "the" and the query "sat". List the three paths between them,
#    with the product and with the smallest weight of each. Which sums are the rollout and the flow?
# 3. **Shuffled weights.** Permute each row of the encoder's attention at random and compute the agreement
#    again. How much of it is left for attention, and how much for its rollout?
# 4. **The bound.** Cut the encoder's maps to the first two layers and compute the flow. Is the first layer
#    still all that counts?
# 5. **Depth.** Find the smallest depth at which the rollout of the decoder has more than nine tenths of the
#    last row on the first token, for the residual weights of `(0.5, 0.9, 0.97)`.
#
# Try them before you read on.

# %% [markdown]
# ## Answers
#
# **1.** Rows sum to 1 in any order, because each matrix has such rows. So the sum is not a check: the result
# is another map, since paths now run through the layers in the wrong order.

# %%
wrong = identity
for layer in A:
    wrong = wrong @ (0.5 * layer + 0.5 * identity)
print("row sums:", wrong.sum(-1).round(6)[:3], " largest difference:", np.abs(wrong - by_hand).max().round(3))

# %% [markdown]
# **2.** The sum of the products is the rollout. The smallest weights sum to the flow, because in two layers
# no two paths share an edge.

# %%
products, smallest = [], []
for middle in range(3):
    lower = graph.edges[(0, 0), (1, middle)]["weight"]
    upper = graph.edges[(1, middle), (2, 2)]["weight"]
    products.append(lower * upper)
    smallest.append(min(lower, upper))
    print(f"through {toy.tokens[middle]!r}: product {products[-1]:.3f}, smallest {smallest[-1]:.3f}")
print(f"rollout {lm.rollout(toy).scores[-1, 2, 0]:.3f} = {sum(products):.3f}")
print(f"flow {flows[2, 0]:.3f} = {sum(smallest):.3f}")

# %% [markdown]
# **3.** Nothing is left of either. The agreement comes from the attention weights, and not from the form of
# the sentence. Every evaluation of maps needs such a control.

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
# **4.** In two layers each path has its own edges, so the flow is a sum of minima, in which both layers
# count.

# %%
two = attention.select_layers([0, 1])
minima = np.minimum((0.5 * A[1] + 0.5 * identity)[:, :, None], (0.5 * A[0] + 0.5 * identity)[None]).sum(1)
print("largest difference:", np.abs(lm.flow(two, layer=-1, normalize=False).scores[0].numpy() - minima).max())

# %% [markdown]
# **5.** The smaller the residual weight, the fewer layers it takes.

# %%
for residual in (0.5, 0.9, 0.97):
    first = lm.rollout(long, residual=residual).scores[:, -1, 0]
    deep = [depth + 1 for depth, share in enumerate(first) if share > 0.9]
    print(
        f"residual weight {residual}: {f'{deep[0]} layers' if deep else 'not within thirty layers'}, "
        f"{first[-1]:.2f} after all"
    )
