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
# # Value Zeroing: what changes without a token?
#
# Take this course if you want to know what a token changes in a layer, and not only how much attention it
# gets. You also learn three tests that you can apply to any map.
#
# **Level:** you know what a value vector and a residual stream are. **Time:** 40 minutes with the exercises.
# **Paper:** Mohebbi et al., "Quantifying Context Mixing in Transformers", EACL 2023.
#
# Attention weights show where a position reads, but not how much this changes its vector. Value Zeroing
# measures the change: it removes one token's value vectors in one layer, and compares the output of the block
# with and without them. In this course you will
#
# 1. compute it by hand with one hook, and compare it with attention,
# 2. test whether the scores show the word that decides (cue alignment),
# 3. test whether they agree with a probe,
# 4. test whether the answer depends on what they rank first (faithfulness).

# %% [markdown]
# ## The model
#
# The model is SmolLM2-135M, a decoder of 30 layers. The next cell loads it without a hub, and works in the
# folder of the repository. With a hub, write
# `TransformerBridge.boot_transformers("HuggingFaceTB/SmolLM2-135M-Instruct")`, or the name of another model.

# %%
from pathlib import Path

import torch

import lens_mix as lm
from demos import models
from lens_mix import evaluation, experiments
from lens_mix.hooks import freeze_pattern, record, zero_values

model = models.demo_model()
prompt = (
    "My grandmother was born in Italy. She left the country with her three children after the war, but all "
    "her life she cooked the food of her home and sang to us in"
)
tokens = model.to_tokens(prompt)
with torch.no_grad():
    clean = model(tokens)[0, -1].log_softmax(-1)
answer = int(clean.argmax())
print(f"the model predicts {model.tokenizer.decode([answer])!r}, probability {clean[answer].exp():.2f}")

# %% [markdown]
# ## By hand
#
# The score of key j for query i in layer l is
#
#     C[l, i, j] = 1 − cos(output of block l at i, the same output with j's value vector zeroed in block l)
#
# The input of the block, its queries and its keys stay as they are, and so does its attention pattern.
# `zero_values(layer, position)` is the hook. With a tensor of positions, each example of a batch has another
# position zeroed. So one pass over copies of the prompt gives all columns.

# %%
layer, length = 23, tokens.shape[1]
name = f"blocks.{layer}.hook_resid_post"
whole, without = {}, {}
zeroed = zero_values(layer, torch.arange(length))
with torch.no_grad():
    model.run_with_hooks(tokens, fwd_hooks=[record(whole, name)])
    logits = model.run_with_hooks(tokens.repeat(length, 1), fwd_hooks=[zeroed, record(without, name)])
by_hand = 1 - torch.cosine_similarity(whole[name].double(), without[name].double(), dim=-1).T
print("[query, key]:", list(by_hand.shape))

# %% [markdown]
# ## Equal to the library
#
# `lm.run` computes all layers. It does not run the model again for every token: the attention output changes
# by a sum of known vectors, so only the rest of the block is computed. The result is the same.

# %%
maps = lm.run(model, prompt, ["attention", "value_zeroing"])
zeroing = maps["value_zeroing"]
torch.testing.assert_close(zeroing.scores[layer].double(), by_hand, rtol=1e-3, atol=1e-6)
print("equal to the library")
for source in zeroing.top(3, layer=layer):
    print(f"  layer {layer}, last position: {source.token!r} at {source.position}: {source.score:.4f}")

# %% [markdown]
# ## Beside attention
#
# Raw scores are small where the residual stream is large, so compare them within a row. `normalized()` scales
# each row to sum 1. The picture shows what the last position used in each layer, by attention and by Value
# Zeroing.

# %%
lm.show_position(maps)

# %% [markdown]
# ## Does the answer depend on it?
#
# A score says how the output of one block changes. Does the answer change too? The pass by hand has already
# computed this: its logits are those of the model with one token's values zeroed in this layer.

# %%
changes = logits[:, -1].log_softmax(-1)[:, answer] - clean[answer]
lm.view.token_bars(
    {
        f"attention, layer {layer}": maps["attention"].scores[layer, -1],
        f"value zeroing, layer {layer}": zeroing.normalized().scores[layer, -1],
        "fall of the answer's log probability": -changes,
    },
    zeroing.tokens,
)

# %% [markdown]
# ## Evaluation 1: cue alignment
#
# In minimal pairs of BLiMP we know the words that decide. After "These patients do respect", the subject
# decides between "themselves" and "himself". The paper calls these words the cue. Cue alignment is the sum of
# the cue's scores in the row that predicts the word, averaged over sentences. It is high if a map shows the
# cue. The paper masks the word in BERT; a decoder predicts it at the last position. We leave out the first
# token, which has much of every row of a decoder, and divide the rest by its sum.

# %%
blimp = Path(models.__file__).parent / "data" / "blimp" / "anaphor_number_agreement.jsonl"
cases = experiments.blimp_cases(model, blimp, 24)
methods = ["attention", "value_norm", "value_zeroing"]
shares = {name: [] for name in methods}
for case in cases:
    for name, m in lm.run(model, case.prompt, methods, queries=[-1]).items():
        row = m.merge_heads().scores[:, 0]
        shares[name].append(row[:, list(case.relevant)].sum(-1) / row[:, 1:].sum(-1))
alignment = {name: torch.stack(each) for name, each in shares.items()}
lm.view.token_bars(
    {name: each.mean(0) for name, each in alignment.items()},
    [str(number) for number in range(model.cfg.n_layers)],
    title="Cue alignment by layer",
)

# %% [markdown]
# ## Equal to the library
#
# The task `Cues` measures the same number, under the name `mass_accuracy`, and adds two controls: a random
# order, and the position alone. The aggregation is the row that is scored: "last" is the last layer, "mean"
# the mean over layers, and "rollout" the product of the layer maps. Ten sentences keep this cell short.
#
# A high cue alignment of a rollout is not evidence. The cue is at the start of these sentences, and a rollout
# of many causal layers is high at the first tokens, whatever they are. The third evaluation tests this.
# Exercise 4 asks how much of the alignment of the layer maps is more than chance.

# %%
first = 10
task = evaluation.Cues(cases[:first], leave_out=(0,))
board = lm.evaluate(model, task, methods, ["last", "mean", "rollout"])
found = board.to_dataframe().groupby(["method", "aggregation"])["mass_accuracy"].mean()
for name, each in alignment.items():
    assert abs(found[name, "last"] - each[:first, -1].double().mean()) < 1e-4
board.show("mass_accuracy")

# %% [markdown]
# ## Evaluation 2: probing
#
# If a map says that the subject was mixed into a position, a probe should find its number there. A probe is a
# linear classifier that reads the residual stream after a layer. The control task gives each noun a number at
# random, so its accuracy shows what a probe can memorize (Hewitt and Liang, EMNLP 2019). The paper correlates
# the probe's accuracy with the subject's score over layers: near 1, they rise together. We probe the last
# position of "The cups near the door", which has another noun after the subject.

# %%
nouns, others = "cup key car dog student doctor friend teacher".split(), "door child box men".split()
subjects = [noun + ending for noun in nouns for ending in ("", "s") for _ in others]
prompts = [f"The {subject} near the {others[number % 4]}" for number, subject in enumerate(subjects)]
states = experiments.residuals_at(model, prompts, -1)
probing = experiments.probe_layers(states, [subject.endswith("s") for subject in subjects], subjects)
print(probing.to_dataframe().iloc[::5].round(2).to_string(index=False))

for name in methods:
    mixed = []
    for m in lm.run_many(model, prompts, name, queries=[-1]):
        subject = next(token for token in m.tokens if token.strip() in subjects)
        mixed.append(m.merge_heads().normalized().scores[:, 0, m.tokens.index(subject)])
    agreement = experiments.probing_agreement(probing, torch.stack(mixed, dim=1))
    print(f"{name:14s} rank correlation with accuracy {agreement.accuracy:+.2f}", end=", ")
    print(f"by sentence {agreement.prompts.nanmean():+.2f}")

# %% [markdown]
# All three correlations are low here, and differ little: with so few sentences, this evaluation does not
# distinguish the methods.
#
# ## Evaluation 3: faithfulness of an input map
#
# The third question is whether the answer depends on what a map ranks first. We replace each token of the
# prompt by " the", and measure how much the answer's log probability changes. Then we compare the
# order of the tokens, controlled for position, because a decoder needs near tokens more than far ones.
#
# The paper combines the layers of an encoder by rollout. In a rollout of thirty causal layers, most of the
# score is on the first token. A mean over layers does not have this problem.

# %%
by_replacement = lm.methods.Occlusion(replacements=[" the"], measure="absolute")
measured = lm.run(model, prompt, by_replacement, queries=[-1], progress=None).scores[0, 0, 1:]
position = torch.arange(1.0, length)
for name, m in maps.items():
    for aggregation in (lm.rollout, lm.layer_mean):
        row = aggregation(m.merge_heads()).scores[-1, -1, 1:]
        score = evaluation.partial_spearman(row, measured, position)
        print(f"{name:14s} {aggregation.__name__:10s} {score:+.2f}")

# %% [markdown]
# ## Evaluation 3 without a rollout
#
# A cell is what one query receives from one key in one layer. `keep_cells` keeps the cells with the highest
# scores, in all layers together, and sets the others to zero. If a map ranks the cells that matter first, few
# cells are enough for the answer. By hand, for a tenth of the cells, this is a mask on the model's own
# patterns.

# %%
fractions = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
draw = torch.Generator().manual_seed(0)
ranked = {name: m.merge_heads() for name, m in maps.items()}
ranked["random"] = zeroing.replace(scores=torch.rand(zeroing.scores.shape, generator=draw).tril())
curves = evaluation.keep_cells(model, prompt, ranked, fractions=fractions)

below = torch.ones(length, length).tril(-1).bool()
count = round(0.1 * below.sum().item() * model.cfg.n_layers)
smallest = zeroing.scores[:, below].flatten().topk(count).values.min()
kept = (zeroing.scores >= smallest) | torch.eye(length).bool()
store, names = {}, [f"blocks.{number}.attn.hook_pattern" for number in range(model.cfg.n_layers)]
with torch.no_grad():
    model.run_with_hooks(tokens, fwd_hooks=[record(store, each) for each in names])
    hooks = [
        freeze_pattern(number, store, edit=lambda pattern, mask=mask: pattern * mask)
        for number, mask in enumerate(kept)
    ]
    value = model.run_with_hooks(tokens, fwd_hooks=hooks)[0, -1].log_softmax(-1)[answer].item()
assert abs(value - curves["value_zeroing"].values[fractions.index(0.1)]) < 1e-3

print("log probability of the answer with a share of the cells")
for name, curve in curves.items():
    values = zip(fractions, curve.values, strict=True)
    print(f"{name:14s}", "  ".join(f"{share:.0%} {value:6.2f}" for share, value in values))

# %% [markdown]
# ## What to keep in mind
#
# - A score says how the output of one block changes, not what the answer depends on. Test that with the hook,
#   as above.
# - One prompt shows how an evaluation works, and not which method is better. In the last table,
#   attention is better than Value Zeroing with one share of the cells, and worse with another.
# - The score already counts the residual stream, so a rollout of Value Zeroing adds no identity matrix.
# - The cosine ignores changes of length. `lm.methods.ValueZeroing(metric="euclidean")` counts them.
# - Means over few sentences have wide intervals. [The evidence](../evidence/index.md) has more
#   sentences and models, and [one page of it](../evidence/layers.md) the conventions.
#
# ## Exercises
#
# 1. Which head is responsible? Compute `lm.methods.ValueZeroing(per_head=True)` for the layer above, and find
#    the head with the largest score of " Italy".
# 2. Zero " Italy" in *all* layers. How probable is the answer then?
# 3. Is the picture the same in another metric? Compare the cosine with `metric="euclidean"` in the last row
#    of every layer.
# 4. How high would the cue alignment be if all scores of a row were equal? In which layers is it higher?

# %% [markdown]
# ## Answers
#
# 1. `top_heads` lists the heads of a row and a key.
# 2. Much less probable: other positions still attend to the token, but read nothing from it in any layer.
# 3. The rank correlation is high. In one row the residual stream is the same for all keys, so the metrics
#    differ only if a change has the direction of the output itself.
# 4. The share of the cue's tokens among all tokens but the first. Few layers have more. So on these sentences
#    the cue alignment of most layers is no evidence for any of the methods.

# %%
heads = lm.run(model, prompt, lm.methods.ValueZeroing(per_head=True), layers=[layer], queries=[-1])
print("1.", heads.top_heads(query=-1, key=" Italy", k=3))

italy = zeroing.tokens.index(" Italy")
with torch.no_grad():
    everywhere = [zero_values(number, italy) for number in range(model.cfg.n_layers)]
    left = model.run_with_hooks(tokens, fwd_hooks=everywhere)[0, -1].log_softmax(-1)[answer].exp()
print(f"2. probability {clean[answer].exp():.2f} with the token, {left:.3f} without")

euclidean = lm.run(model, prompt, lm.methods.ValueZeroing(metric="euclidean"), queries=[-1])
cosine = lm.run(model, prompt, "value_zeroing", queries=[-1])
table = lm.compare({"cosine": cosine, "euclidean": euclidean}, drop_first=True)
print(f"3. mean rank correlation over layers {table['spearman'].mean():.2f}")

even = sum(len(case.relevant) / (len(case.prompt) - 1) for case in cases) / len(cases)
above = {name: (each.mean(0) > even).sum().item() for name, each in alignment.items()}
counts = ", ".join(f"{name} in {count}" for name, count in above.items())
print(f"4. {even:.2f}; of {model.cfg.n_layers} layers, it is higher by {counts}")
