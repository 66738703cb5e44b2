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
# # Self-attention attribution: which attention mattered for the answer?
#
# Take this course if you want to know which attention weights an answer needs, and which heads can be
# removed. The weights alone do not show this, because a head may read a token without any effect on the
# answer.
#
# **Level:** you know what an attention head and a gradient are. **Time:** 40 minutes with the exercises.
# **Paper:** Hao et al., "Self-Attention Attribution", AAAI 2021.
#
# Self-attention attribution multiplies each weight by the gradient of the answer, integrated along a path
# from no attention to the model's own attention. In this course you will
#
# 1. compute it by hand in ten lines, and check that its scores sum to the change of the answer,
# 2. draw the tree of a sentence,
# 3. find the heads that can be removed,
# 4. find words that change the answers of other sentences.

# %% [markdown]
# ## The model
#
# The model is a small encoder that reads a sentence up to its verb, and answers at [CLS] whether the verb is
# plural. Abnar and Zuidema (ACL 2020) used the same task. Between the subject and the verb there is at least
# one noun of the other number, so the model has to find the subject.
#
# The first call trains the model, which takes about a minute, and stores the weights in the cache folder. The
# code comes from the benchmarks of the repository, so the next cell works in its folder, with
# TransformerLens 4. With a hub, `TransformerBridge.boot_transformers("gpt2")` loads a language model, whose
# targets are written as `lm.targets.token(" are")`.

# %%
import torch

import lens_mix as lm
from benchmarks.number_agreement.encoder import Recipe, classifier, held_out
from benchmarks.number_agreement.sentences import CLS, token_ids, vocabulary
from lens_mix import evaluation, experiments
from lens_mix.hooks import prune_heads, record, replace_pattern
from lens_mix.view.tree_figure import tree_figure

encoder = classifier("verb", Recipe(layers=4, d_model=64, steps=600, learning_rate=1e-3))
model = encoder.model
sentences = held_out(400)
print(f"right answers in new sentences: {encoder.accuracy(sentences):.3f}")

# %% [markdown]
# We explain one number for one sentence: F, the probability of the right answer. lens_mix calls it the
# target. It is a function from logits to one number per example.

# %%
sentence = sentences[48]
words = [CLS, *(f" {word}" for word in sentence.words)]
tokens = torch.tensor([token_ids(sentence)])
target = encoder.probability(int(sentence.plural))
answer = target(model(tokens)).item()
print("".join(words), "…")
print(f"F = P(plural verb) = {answer:.3f}; the subject is {sentence.words[sentence.subject]!r}")

# %% [markdown]
# ## By hand
#
# Let A be the attention pattern of one layer, with one matrix per head. The score of an entry is
#
#     Attr(A) = A · ∫₀¹ ∂F(α A) / ∂A dα
#
# The pattern of the layer grows from 0 to A, all heads together, and the layers above run again at every
# step. `record` stores the model's own pattern. `replace_pattern` uses another one in its place. The integral
# becomes a mean over steps; the paper's code takes twenty.

# %%
layer = 0
store = {}
model.run_with_hooks(tokens, fwd_hooks=[record(store, f"blocks.{layer}.attn.hook_pattern")])
pattern = store[f"blocks.{layer}.attn.hook_pattern"].detach()


def answer_with(pattern):
    """Return F as a function of the pattern of one layer."""
    return target(model.run_with_hooks(tokens, fwd_hooks=[replace_pattern(layer, pattern)]))[0]


def attribute(steps):
    """Return the pattern times the mean gradient along the path."""
    gradient = 0
    for k in range(steps):
        point = (k / steps * pattern).requires_grad_()
        gradient += torch.autograd.grad(answer_with(point), point)[0] / steps
    return (pattern * gradient)[0]


by_hand = attribute(20)
print("[head, query, key]:", list(by_hand.shape))

# %% [markdown]
# ## Completeness
#
# The scores of a layer sum to F(A) − F(0), the answer with this attention minus the answer without it. This
# property is called completeness. It gives the scores the unit of F, and checks the integral: the gap between
# the two is the integral's error.

# %%
with torch.no_grad():
    change = (answer_with(pattern) - answer_with(0 * pattern)).item()
print(f"F(A) - F(0) = {change:+.4f}")
for steps in (1, 5, 20, 100):
    total = attribute(steps).sum().item()
    print(f"{steps:4d} steps: the scores sum to {total:+.4f}, gap {total - change:+.4f}")

# %% [markdown]
# ## Equal to the library
#
# The same method with the options of the paper's code gives the same scores. By default the library takes the
# points of a Gauss rule, and adds points to a layer until its estimated error is small. It has a smaller gap
# with fewer steps.

# %%
as_in_the_paper = lm.methods.AttentionAttribution(
    target=target, n_steps=20, method="riemann_left", per_head=True
)
paper = lm.run(model, tokens, as_in_the_paper, progress=None)
torch.testing.assert_close(paper.scores[layer], by_hand, rtol=1e-3, atol=1e-5)
print("equal to the library")

m = lm.run(model, tokens, lm.methods.AttentionAttribution(target=target)).replace(tokens=words)
details = m.provenance["details"]
for number in range(len(m.scores)):
    steps, gap = details["steps"][number], details["completeness_gap"][number]
    print(f"layer {number}: {steps} steps, gap {gap:+.1e}, all scores sum to {m.scores[number].sum():+.3f}")

# %% [markdown]
# ## The maps of all layers
#
# Each layer has its own integral, so layers can be compared. The scores have signs: a negative one lowers the
# probability of the answer. In the picture, rows are queries and columns are keys, and heads are summed.

# %%
lm.view.layer_maps(m, normalize=False, title=f"Attribution of P(plural verb) = {answer:.3f}")

# %% [markdown]
# ## A tree
#
# The paper summarizes the maps as a tree. It starts at a root in the top layer, and goes down layer by layer.
# Through each layer, a token of the tree adds the tokens whose score is above a share of the layer's largest
# score, here 0.4. Each token is added once. The answer is read at [CLS], so [CLS] is the root.

# %%
parents = {0: None}
for number in reversed(range(len(m.scores))):
    scores = m.scores[number]
    candidates = (scores > 0.4 * scores.max()).nonzero().tolist()
    candidates.sort(key=lambda edge: -scores[tuple(edge)].item())
    tree_so_far = set(parents)
    for query, key in candidates:
        if query in tree_so_far and key not in parents:
            parents[key] = query

tree = lm.attribution_tree(m, root=0)
assert {child[1]: parent[1] for child, parent in tree.edges} == {k: q for k, q in parents.items() if k}
print(lm.aggregation.tree_text(tree))
tree_figure(tree, title="Attribution tree from [CLS]")

# %% [markdown]
# ## Which heads are important?
#
# The importance of a head is the largest score of its map, averaged over sentences. Its two baselines in the
# paper are the largest attention weight, and a Taylor expansion: how much the loss would change without the
# head, to first order. `head_importance` computes all three.

# %%
explained, others = sentences[:12], sentences[200:400]
prompts = [torch.tensor(token_ids(one)) for one in explained]
targets = [encoder.probability(int(one.plural)) for one in explained]
largest = []
for prompt, one in zip(prompts, targets, strict=True):
    maps = lm.run(model, prompt, lm.methods.AttentionAttribution(target=one, per_head=True))
    largest.append(maps.scores.amax((-2, -1)))

losses = [encoder.loss(int(one.plural)) for one in explained]
rankings = {
    "attribution": experiments.head_importance(model, prompts, targets=targets),
    "attention": experiments.head_importance(model, prompts, "attention"),
    "Taylor": experiments.head_importance(model, prompts, "taylor", targets=losses),
}
torch.testing.assert_close(rankings["attribution"].scores, torch.stack(largest).double().mean(0))
for name, importance in rankings.items():
    strongest = ", ".join(f"head {head} of layer {layer}" for layer, head, _ in importance.top(3))
    print(f"{name:12s} {strongest}")
rankings["attribution"].show()

# %% [markdown]
# ## Does the model need the others?
#
# A ranking is good if the heads at its end can be removed. We remove the least important heads first, and
# measure the accuracy on sentences that were not used for the ranking. Without any head, the answer is a
# guess. The random order is the control.


# %%
def accuracy(model):
    """Return the share of right answers; the encoder runs the model with its present hooks."""
    return encoder.accuracy(others)


shares = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)
curves = experiments.pruning_curves(model, accuracy, rankings, fractions=shares, random=3)

order = rankings["attribution"].ranking()
hooks = [prune_heads(layer, head) for layer, head in order[: round(0.6 * len(order))]]
with model.hooks(fwd_hooks=hooks):
    assert accuracy(model) == curves.values["attribution"][shares.index(0.6)]
curves.show(metric="accuracy", title=f"{len(others)} other sentences")

# %% [markdown]
# ## Triggers
#
# The strongest entries of a sentence name a few words. The paper copies these words, called a trigger, into
# other sentences at the same relative positions. If these words decide, the answer to the other sentences
# changes.
# `extract_triggers` takes the two strongest entries of the strongest head, and `insert_trigger` copies them.
#
# The report has the accuracy before and after, for the sentences with the trigger's own answer and for those
# with the other answer. A trigger that decides lowers the accuracy of the latter.

# %%
special, names = [vocabulary()[CLS]], list(vocabulary())
examples = [experiments.Example(tuple(token_ids(one)), one.plural) for one in [*explained, *others]]
triggers = experiments.extract_triggers(model, examples[:12], targets=targets, special=special)
changed = experiments.insert_trigger(triggers[0], examples[20], special)
print("trigger:", " … ".join(names[piece.token] for piece in triggers[0].pieces))
print("before: ", " ".join(names[token] for token in examples[20].tokens))
print("after:  ", " ".join(names[token] for token in changed.tokens))


def predict(examples):
    """Return the predicted classes."""
    return encoder.logits([example.tokens for example in examples]).argmax(-1).bool().tolist()


report = experiments.trigger_report(examples, triggers[:5], predict, special=special)
for trigger, label, _, before, after in sorted(report.rows, key=lambda row: row[1] == row[0].source.label):
    whose = "own" if label == trigger.source.label else "other"
    text = " … ".join(names[piece.token] for piece in trigger.pieces)
    print(f"{whose:5s} answer: accuracy {before:.2f} before, {after:.2f} after   {text}")

# %% [markdown]
# ## What to keep in mind
#
# - A score is about one target. Another target has other scores.
# - Each layer is explained alone. In the layers below, positions have been mixed. So a high score of a key in
#   the last layer does not name a word of the input.
# - The baseline is a layer without attention, which no trained model has seen.
# - Check `completeness_gap` before you read a layer. On deep models the first layers often need more points.
#   [The evidence](../evidence/layers.md) has figures for several models.
#
# ## Exercises
#
# 1. Explain the *wrong* answer of the sentence. How do its scores relate to those of the right answer?
# 2. A gradient at one point costs a fraction of the integral. Compare A · ∂F/∂A, taken at A itself, with
#    the integral: does it keep completeness? Does it keep the order of the entries?
# 3. Remove the most important heads first (`remove="most"`). How many heads are enough to destroy the answer?
# 4. Insert random words at the places of the trigger. Is the trigger's effect more than that of any words?

# %% [markdown]
# ## Answers
#
# 1. The two probabilities sum to 1, so the scores are the same with the other sign.
# 2. It does not keep completeness. At A the model is sure of its answer, and a small change of the pattern
#    does not change F: the gradient is almost zero. The order is kept only in part. So the method integrates.
# 3. More than the largest share that is printed below: the accuracy is then still above a guess. But the
#    smallest share already costs more accuracy than most of the least important heads do above.
# 4. As many random words at the same places are a fair control. They lower the accuracy of both classes,
#    because they are noise. The trigger lowers that of the other answer more, and that of its own answer
#    less.

# %%
import dataclasses
import random

wrong = lm.run(model, tokens, lm.methods.AttentionAttribution(target=encoder.probability(0)))
print(f"1. largest difference from the opposite: {(wrong.scores + m.scores).abs().max():.1e}")

leaf = pattern.clone().requires_grad_()
one_point = (pattern * torch.autograd.grad(answer_with(leaf), leaf)[0])[0]
agreement = evaluation.spearman(one_point.flatten(), by_hand.flatten())
print(f"2. sum {one_point.sum():+.4f} instead of {change:+.4f}; rank correlation {agreement:.2f}")

shares = (0.1, 0.2, 0.4)
most = experiments.pruning_curves(model, accuracy, rankings, fractions=shares, remove="most", random=0)
left = ", ".join(f"{value:.2f}" for value in most.values["attribution"])
print(f"3. accuracy without the 10, 20 and 40 % most important heads: {left}")

draw = random.Random(0)
pool = [token for example in examples for token in example.tokens if token not in special]
noise = []
for trigger in triggers:
    pieces = [dataclasses.replace(piece, token=draw.choice(pool)) for piece in trigger.pieces]
    noise.append(dataclasses.replace(trigger, pieces=tuple(pieces)))
for name, inserted in {"triggers": triggers, "random words": noise}.items():
    report = experiments.trigger_report(examples, inserted, predict, special=special)
    lost = {"own": [], "other": []}
    for trigger, label, _, before, after in report.rows:
        lost["own" if label == trigger.source.label else "other"].append(before - after)
    means = ", ".join(f"{sum(each) / len(each):.2f} with the {whose} answer" for whose, each in lost.items())
    print(f"4. {name}: accuracy lost {means}")
