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
# # Norms: why attention weights are not effects
#
# Take this course if you explain a model by its attention weights. A large weight on a short vector moves
# almost nothing, so you learn to measure what is moved instead.
#
# **Level:** you know how a transformer block is computed and can read einsum. **Time:** 60 minutes with the
# exercises. **Papers:** Kobayashi et al., "Attention is Not Only a Weight", EMNLP 2020; "Incorporating
# Residual and Normalization Layers into Analysis of Masked Language Models", EMNLP 2021; "Analyzing
# Feed-Forward Blocks in Transformers through the Lens of Attention Maps", ICLR 2024.
#
# An attention weight multiplies a vector. How much a position receives depends on both. In this course you
# will
#
# 1. compute the vectors that attention adds, and see how much their lengths differ from the weights,
# 2. test the hypothesis that attention to special tokens does nothing, by taking their vectors away,
# 3. add the residual stream, the norm and the feed-forward, one after the other, by hand,
# 4. see how little of a vector comes from other positions, in an encoder and in a decoder.

# %% [markdown]
# ## Two models
#
# The next cell loads the models from packages, so it needs no model hub. It uses `demos/models.py`, so a
# downloaded notebook has to be in the folder of the repository. If you have access to a hub, load the same
# encoder with `TransformerBridge.boot_transformers("sentence-transformers/all-MiniLM-L6-v2")`, and the
# decoder, with weights that are not quantised, with
# `TransformerBridge.boot_transformers("HuggingFaceTB/SmolLM2-135M-Instruct")`.

# %%
import pandas as pd
import torch

import lens_mix as lm
from demos import models
from lens_mix.evaluation import spearman
from lens_mix.experiments import cancel_effect, contextualisation, mixing_ratio, norm_figures
from lens_mix.hooks import zero_values
from lens_mix.view import layer_maps, token_bars

torch.set_grad_enabled(False)
encoder = models.minilm()
decoder = models.demo_model()

# %% [markdown]
# ## What attention adds to a vector
#
# The output of attention at position i is a sum over keys j and heads h:
#
# ```text
# y_i = Σ_j Σ_h α_h(i, j) f_h(x_j) + b_O        f_h(x) = (x W_V + b_V) W_O
# ```
#
# α is the attention weight, and f(x) the vector that it multiplies. The weight alone shows how much a
# position receives only if all f(x) have the same length. We compute the vector of each pair of positions in
# one layer.

# %%
sentence = "The author talked to Sara about her book."
_, cache = encoder.run_with_cache(encoder.to_tokens(sentence))
layer = 3

pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0]  # head query key
values = cache[f"blocks.{layer}.attn.hook_v"][0]  # key head d_head
f = torch.einsum("khd,hdm->khm", values, encoder.W_O[layer])
added = torch.einsum("hqk,khm->qkm", pattern, f)  # query key d_model

output = added.sum(1) + encoder.b_O[layer]
print(
    "largest difference from the model's output:",
    float((output - cache[f"blocks.{layer}.attn.o.hook_out"][0]).abs().max()),
)

# %% [markdown]
# The sum over keys is the output of the model's attention, so nothing is missing. The length of each vector
# is the map `value_norm`, AttnN in the papers.

# %%
maps = lm.run(encoder, sentence, ["attention", "value_norm", "value_zeroing"])
difference = added.norm(dim=-1) - maps["value_norm"].scores[layer]
print("largest difference from lm.run:", float(difference.abs().max()))
layer_maps(maps["attention"].merge_heads(), columns=3, title="Attention weights")

# %%
layer_maps(maps["value_norm"], columns=3, title="Lengths of the weighted vectors")

# %% [markdown]
# By weight, `[CLS]` has most of nearly every row, from the second layer on. By length, it has little, except
# in its own row, and "author", "talked" and "sara" appear. Which of the two is right about the model?

# %% [markdown]
# ## Weights and vectors against each other
#
# `weights_and_norms` lists the mean weight and the length ‖f(x)‖ of every key, head and layer. We use a few
# sentences, and take the mean by kind of token.

# %%
SENTENCES = [
    sentence,
    "The cat sat on the mat, and the dog slept by the door.",
    "Paris is the capital of France; Rome is the capital of Italy.",
    "After the storm, the fishermen repaired their nets.",
    "The committee has not decided whether the plan will go ahead.",
]
lengths = cancel_effect.weights_and_norms(encoder, SENTENCES)
cancel_effect.no_op_table(lengths.assign(layer="all")).round(2)

# %%
norm_figures.weights_against_norms(lengths, title="Attention weight and vector length, all-MiniLM-L6-v2")

# %% [markdown]
# Each dot is a token in a layer. The dots in the upper left are `[CLS]`: it gets most of the weight, and its
# vectors are the shortest of all, so that their product is small. The papers call this the cancel effect. The
# strongest cases:

# %%
cancel_effect.cancelled_tokens(lengths)

# %% [markdown]
# ## The no-op hypothesis
#
# Clark et al. (2019) proposed that a head attends to `[SEP]` or `[CLS]` if it has nothing to do: the weights
# of a row have to sum to 1, and there they change nothing. Kobayashi et al. (2020) found the mechanism, the
# short vectors above. A mechanism can be tested. If it is real, then the model hardly changes when the value
# vectors of `[CLS]` are zero in every layer.
#
# The sentence vector of this encoder is the mean over the positions. We zero the values of one position in
# all layers, and measure 1 minus the cosine of the sentence vectors.


# %%
def sentence_vector(tokens, hooks=(), **inputs):
    """Return the mean of the last layer's output over the positions."""
    kept = []
    last = f"blocks.{encoder.cfg.n_layers - 1}.hook_out"
    keep = (last, lambda value, hook: kept.append(value))
    encoder.run_with_hooks(tokens, fwd_hooks=[*hooks, keep], **inputs)
    return kept[0][0].mean(0)


def changes_without_values(text):
    """Return how much the sentence vector changes if the values of a position are zero, for each position."""
    tokens = encoder.to_tokens(text)
    clean = sentence_vector(tokens)
    changed = [
        sentence_vector(tokens, [zero_values(layer, position) for layer in range(encoder.cfg.n_layers)])
        for position in range(tokens.shape[1])
    ]
    return 1 - torch.nn.functional.cosine_similarity(torch.stack(changed), clean, dim=-1)


received = {
    "attention weight": maps["attention"].merge_heads().scores.mean((0, 1)),
    "vector length, ‖αf(x)‖": maps["value_norm"].normalized().scores.mean((0, 1)),
    "Value Zeroing": maps["value_zeroing"].normalized().scores.mean((0, 1)),
    "change without its values": changes_without_values(sentence),
}
token_bars(received, maps["attention"].tokens, title="What each token gives, mean over layers and positions")

# %% [markdown]
# The hypothesis is right about this model. `[CLS]` has about half of the attention, and the sentence vector
# hardly changes without its values. Lengths and Value Zeroing agree with this. Rank correlation with the
# measured change, for each sentence:

# %%
rows = []
for text in SENTENCES:
    found = lm.run(encoder, text, ["attention", "value_norm", "value_zeroing"])
    change = changes_without_values(text)
    means = {name: one.merge_heads().normalized().scores.mean((0, 1)) for name, one in found.items()}
    rows.append({name: spearman(mean, change) for name, mean in means.items()})
pd.DataFrame(rows, index=SENTENCES).round(2)

# %% [markdown]
# ## The same in a decoder: the attention sink
#
# In decoders the first token gets this attention. Here the measured change is that of the log probability of
# the predicted token.

# %%
prompt = "My grandmother was born in Italy. All her life she cooked the food of her home and sang to us in"
tokens = decoder.to_tokens(prompt)
found = lm.run(decoder, prompt, ["attention", "value_norm"], queries=-1)
clean = decoder(tokens)[0, -1].log_softmax(-1)
answer = clean.argmax()
change = []
for position in range(tokens.shape[1]):
    hooks = [zero_values(layer, position) for layer in range(decoder.cfg.n_layers)]
    logits = decoder.run_with_hooks(tokens, fwd_hooks=hooks)
    change.append(float(clean[answer] - logits[0, -1].log_softmax(-1)[answer]))

token_bars(
    {
        "attention weight": found["attention"].merge_heads().scores[:, 0].mean(0),
        "vector length, ‖αf(x)‖": found["value_norm"].normalized().scores[:, 0].mean(0),
        "loss of log probability\nwithout its values": torch.tensor(change).clamp_min(0),
    },
    found["attention"].tokens,
    title="Sources of the last position, mean over layers",
)

# %%
cancel_effect.cancelled_tokens(cancel_effect.weights_and_norms(decoder, prompt))

# %% [markdown]
# The first token has the largest weight by far, and its vectors are short. By length, its share is less than
# half of that. The prediction hardly depends on its values: it depends on "Italy" and on the last words. A
# mean over layers has its own limit: "Italy" counts in a single layer, so its mean is small by weight and by
# length.

# %% [markdown]
# ## The residual stream
#
# Attention adds to a vector and does not replace it. After the residual connection, position i has
#
# ```text
# x_i + y_i = Σ_j F(i, j) + b_O        F(i, j) = Σ_h α_h(i, j) f_h(x_j) + (x_i if j = i else 0)
# ```
#
# The *mixing ratio* r of a position is the share of this that comes from other positions:
#
# ```text
# r = ‖Σ_{j≠i} F(i, j)‖ / (‖Σ_{j≠i} F(i, j)‖ + ‖F(i, i)‖)
# ```

# %%
block_input = cache[f"blocks.{layer}.hook_resid_pre"][0]
positions = torch.arange(len(block_input))
F = added.clone()
F[positions, positions] += block_input


def ratio(vectors):
    """Return the mixing ratio of each position, from the vectors of all pairs."""
    own = vectors[positions, positions]
    mixed = (vectors.sum(1) - own).norm(dim=-1)
    return mixed / (mixed + own.norm(dim=-1))


ratios = mixing_ratio.mixing_ratios(encoder, sentence)
library = ratios[(ratios["layer"] == layer) & (ratios["stage"] == "attn_res")]["ratio"]
print("largest difference:", float((ratio(F) - torch.tensor(library.to_numpy())).abs().max()))
print(f"without the residual stream {ratio(added).mean():.2f}, with it {ratio(F).mean():.2f}")

# %% [markdown]
# ## The norm
#
# A norm is not linear. But the model's vector is divided by one number, so the norm of a sum can be
# distributed over its summands: subtract the summand's mean, multiply by γ, and divide by the standard
# deviation of the *whole* vector. The lengths are the map `attn_res_ln`.

# %%
whole = F.sum(1) + encoder.b_O[layer]
norm = encoder.blocks[layer].ln1
deviation = (whole.var(-1, unbiased=False) + encoder.cfg.eps).sqrt()


def apply_norm(vectors):
    """Return summands of the norm's input as summands of its output."""
    return norm.weight * (vectors - vectors.mean(-1, keepdim=True)) / deviation[:, None, None]


after_norm = apply_norm(F)
bias = apply_norm(encoder.b_O[layer].expand(len(positions), 1, -1))[:, 0] + norm.bias
print(
    "difference from the model's output of the norm:",
    float((after_norm.sum(1) + bias - cache[f"blocks.{layer}.ln1.hook_out"][0]).abs().max()),
)

stages = lm.run(encoder, sentence, contextualisation.METHODS)
difference = after_norm.norm(dim=-1) - stages["attn_res_ln"].scores[layer]
print("difference from lm.run:", float(difference.abs().max()))

# %% [markdown]
# ## The feed-forward
#
# The feed-forward works on each position alone, yet it changes which parts of the vector are long. Its
# activation is not linear either. Integrated gradients, from the zero vector to the real one, give each
# neuron one factor: m = act(p) / p, where p is the input of the activation. With this factor the feed-forward
# is a matrix for each position, which multiplies every summand.

# %%
before_activation = cache[f"blocks.{layer}.mlp.hook_pre"][0]
factor = torch.nn.functional.gelu(before_activation) / before_activation
through = ((after_norm @ encoder.W_in[layer]) * factor[:, None]) @ encoder.W_out[layer]
print("difference from lm.run:", float((through.norm(dim=-1) - stages["atb_ff"].scores[layer]).abs().max()))

# %%
norm_figures.contextualisation(
    contextualisation.changes(stages), title="How much each component reorders the map, encoder"
)

# %% [markdown]
# The figure shows 1 minus the rank correlation of the maps before and after each component. The feed-forward
# reorders the pairs, and the residual connection and the norm after it reorder them again. In several layers
# the whole block (black) changes less than the feed-forward alone: the later components cancel part of its
# effect. This is the finding of the third paper. In the decoder it is stronger:

# %%
norm_figures.contextualisation(
    contextualisation.changes(lm.run(decoder, prompt, contextualisation.METHODS)),
    title="How much each component reorders the map, decoder",
)

# %% [markdown]
# ## How much do positions mix?
#
# Now all stages at once, for both models, by layer.

# %%
norm_figures.mixing_by_layer(mixing_ratio.mixing_ratios(encoder, SENTENCES), "Mixing ratio, all-MiniLM-L6-v2")

# %%
norm_figures.mixing_by_layer(mixing_ratio.mixing_ratios(decoder, prompt), "Mixing ratio, SmolLM2-135M")

# %% [markdown]
# By attention weights, most of each vector comes from other positions, in every layer. By vectors, with the
# residual stream, it is a small share, and smaller in the deep decoder than in the encoder. The decoder's
# norms are before attention and feed-forward, so its lines for `attn_res` and `attn_res_ln` are the same.
#
# This is why the rollout of attention weights, with a residual weight of one half, mixes too much: see [the
# course on rollout and flow](rollout_and_flow.ipynb).
#
# ## What the lengths leave out
#
# A length has no direction. Two long vectors can cancel each other in the sum, and a vector can be long in a
# direction that no later layer reads. `alti` compares each vector with the sum, and Value Zeroing measures
# the change of the block's output. [The course on Value Zeroing](value_zeroing.ipynb) begins there.

# %% [markdown]
# ## Exercises
#
# 1. **Heads.** `value_norm` of a layer is the length of the sum over the heads. Compute the sum of the heads'
#    lengths instead. Why is it never smaller, and where do the two differ most?
# 2. **The other special token.** Repeat the test of the no-op hypothesis for `[SEP]` and the full stop with
#    all sentences. Which tokens change the sentence vector least?
# 3. **Where does b_V belong?** The vector f(x) contains b_V W_O, which is the same for all tokens. Take it
#    out of f and compare the lengths of `[CLS]`.
# 4. **Patterns instead of values.** Mask the attention to `[CLS]`, so that the other weights grow. Does the
#    sentence vector change more than without its values? What does that say about the word "no-op"?
# 5. **Words that mix.** Use `mixing_ratio.by_kind` to compare kinds of tokens in the encoder.
#
# Try them before you read on.

# %% [markdown]
# ## Answers
#
# **1.** The length of a sum is at most the sum of the lengths. The difference is large where heads write in
# opposite directions.

# %%
by_head = torch.einsum("hqk,khm->hqkm", pattern, f).norm(dim=-1).sum(0)
together = added.norm(dim=-1)
print("sum of lengths is never smaller:", bool((by_head >= together - 1e-5).all()))
difference = by_head / together
query, key = divmod(int(difference.argmax()), len(positions))
names = maps["attention"].tokens
print(
    f"largest factor {difference.max():.1f}: {names[query]!r} from {names[key]!r}; "
    f"mean over all pairs {difference.mean():.1f}"
)

# %% [markdown]
# **2.** On average, both special tokens change it least. The full stop is close to the words.

# %%
table = []
for text in SENTENCES:
    changed = changes_without_values(text)
    texts = lm.run(encoder, text, "attention").tokens
    table += [
        {"token": token if token in ("[CLS]", "[SEP]", ".") else "words", "change": float(value)}
        for token, value in zip(texts, changed, strict=True)
    ]
pd.DataFrame(table).groupby("token")["change"].agg(["mean", "min", "max"]).round(3)

# %% [markdown]
# **3.** For `[CLS]`, the vectors get longer without b_V: its values point away from the bias. For
# other tokens, the bias makes little difference. If TransformerLens folds b_V into b_O, b_V is no longer part
# of a map; the record of a map says which it was.

# %%
b_V = encoder.blocks[layer].attn.b_V
without = torch.einsum("khd,hdm->khm", values - b_V.reshape(values.shape[1:]), encoder.W_O[layer])
print(f"[CLS]: mean ‖f‖ {f[0].norm(dim=-1).mean():.2f}, without b_V {without[0].norm(dim=-1).mean():.2f}")
print(f"other tokens: {f[1:].norm(dim=-1).mean():.2f}, without b_V {without[1:].norm(dim=-1).mean():.2f}")

# %% [markdown]
# **4.** It changes more. The values of `[CLS]` do little, but its weight does something: it makes the other
# weights small. "No-op" is true of the vectors. The attention to `[CLS]` is how a head reads less of the
# words.

# %%
tokens = encoder.to_tokens(sentence)
clean = sentence_vector(tokens)
mask = torch.ones_like(tokens)
mask[0, 0] = 0
variants = {
    "values zeroed": sentence_vector(tokens, [zero_values(number, 0) for number in range(6)]),
    "attention masked": sentence_vector(tokens, attention_mask=mask),
}
for name, vector in variants.items():
    print(f"[CLS], {name}: {1 - torch.nn.functional.cosine_similarity(vector, clean, dim=0):.3f}")

# %% [markdown]
# **5.**

# %%
mixing_ratio.by_kind(mixing_ratio.mixing_ratios(encoder, SENTENCES)).round(2)
