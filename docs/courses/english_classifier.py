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
# # An English classifier: does a map find the word that decides?
#
# **Level:** you know what an attention head and a gradient are. **Time:** 30 minutes with the exercises.
# **Papers:** Mohebbi et al., "Quantifying Context Mixing in Transformers", EACL 2023 (cue alignment); Hao et
# al., "Self-Attention Attribution", AAAI 2021 (heads, trees, triggers).
#
# This page adapts the tests of these papers to a classifier that others trained to correct English. The score
# of cue alignment is the page's own. You will
#
# 1. load a DistilBERT with `lm.wrap`, and explain one of its corrections,
# 2. measure whether maps point to the word that decides, against two simple rules,
# 3. remove heads in the order of three rankings, and in random order,
# 4. draw the tree of a correction,
# 5. find words that change the answers to other sentences.
#
# Means over sentences have their number n and an interval of the bootstrap. Some results are negative.

# %% [markdown]
# ## The model
#
# The model is a DistilBERT with a classifier of tokens. It reads a sentence, and gives every token an edit:
# `$KEEP`, or for example `$REPLACE_there`. `lm.wrap` makes a TransformerBridge of it and compares every block
# with the original. The course needs a checkout of this repository, `onnx`, and TransformerLens 3 or later.
# The model's 8-bit weights were converted to float32.

# %%
import dataclasses
import json
import random
from pathlib import Path

import torch

import lens_mix as lm
from demos import models
from lens_mix import evaluation, experiments
from lens_mix.hooks import record
from lens_mix.view.tree_figure import tree_figure

model = models.quire_tagger()
tokenizer = model.tokenizer


def interval(values, against=None):
    """Return a mean, or a mean difference, with its 95 % interval and its count as text."""
    found, sign = evaluation.bootstrap(values, against), "" if against is None else "+"
    low, high = format(found.low, f"{sign}.2f"), format(found.high, f"{sign}.2f")
    return f"{found.mean:{sign}.2f} [{low}, {high}], n = {found.count}"


# %% [markdown]
# ## The sentences
#
# Each line of the first list has a sentence with a gap, the right word, the wrong word, and the cue: the word
# of the sentence that decides between the two. The second list has the subjects of BLiMP's agreement pairs
# (Warstadt et al., 2020), followed by a verb phrase with "has" or "have". There, the cue is the noun.

# %%
HOMOPHONES = """
They parked _ car outside . | their there car
We lost _ keys again . | their there keys
She likes _ new house . | their there house
He repaired _ old boat . | their there boat
I met _ brother in town . | their there brother
You forgot _ names at once . | their there names
We painted _ kitchen green . | their there kitchen
I read _ letters last night . | their there letters
We went _ last week . | there their went
She moved _ with her family . | there their moved
He stayed _ all summer . | there their stayed
I lived _ for two years . | there their lived
They drove _ in the rain . | there their drove
You slept _ the whole night . | there their slept
We stood _ in silence . | there their stood
She walked _ without a coat . | there their walked
He is taller _ his brother . | than then taller
The book is better _ the film . | than then better
This road is longer _ that one . | than then longer
My dog is older _ your cat . | than then older
The tea was colder _ the soup . | than then colder
Her house is smaller _ mine . | than then smaller
Today is warmer _ yesterday . | than then warmer
The train was faster _ the bus . | than then faster
"""


def make(words, gap, right, wrong, cues, kind):
    """Return one item: the sentence with the right and with the wrong word, and the positions of tokens."""
    item = {"kind": kind, "right": right, "wrong": wrong, "label": f"$REPLACE_{right}"}
    for name, word in (("good", right), ("bad", wrong)):
        encoding = tokenizer([*words[:gap], word, *words[gap + 1 :]], is_split_into_words=True)
        numbers = encoding.word_ids()
        item[name] = torch.tensor(encoding["input_ids"])
        item[f"{name}_position"] = numbers.index(gap)
        item["cue"] = [place for place, number in enumerate(numbers) if number in cues]
    item["text"] = " ".join([*words[:gap], wrong, *words[gap + 1 :]])
    return item


items = []
for line in HOMOPHONES.strip().splitlines():
    sentence, choice = line.split(" | ")
    words, (right, wrong, cue) = sentence.split(), choice.split()
    items.append(make(words, words.index("_"), right, wrong, [words.index(cue)], "homophone"))

file = Path(models.__file__).parent / "data" / "blimp" / "regular_plural_subject_verb_agreement_1.jsonl"
pairs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
for pair in pairs[:36]:
    subject, is_singular = pair["one_prefix_prefix"].split(), pair["one_prefix_word_good"].endswith("s")
    forms = ("has", "have") if is_singular else ("have", "has")
    words, gap = [*subject, "_", "been", "there", "before", "."], len(subject)
    items.append(make(words, gap, *forms, [gap - 1], "agreement"))


hf_model = lm.targets.hf_classifier(model, "$KEEP", position=0).hf_model
labels = hf_model.config.label2id


def tag(sentences, model=model):
    """Return the logits [token, label] of each sentence, from the model with the hooks that it has now."""
    lengths = [len(tokens) for tokens in sentences]
    batch = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    mask = (torch.arange(batch.shape[1]) < torch.tensor(lengths)[:, None]).long()
    store, name = {}, f"blocks.{model.cfg.n_layers - 1}.hook_out"
    with torch.no_grad():
        model.run_with_hooks(batch, attention_mask=mask, fwd_hooks=[record(store, name)])
        logits = hf_model.classifier(store[name])
    return [each[:length] for each, length in zip(logits, lengths, strict=True)]


def corrects(items, model=model):
    """Return for each item 1 if the wrong word gets the right correction, else 0."""
    answers = tag([item["bad"] for item in items], model)
    return [
        float(logits[item["bad_position"]].argmax() == labels[item["label"]])
        for item, logits in zip(items, answers, strict=True)
    ]


known = []
for kind in ("homophone", "agreement"):
    own = [item for item in items if item["kind"] == kind]
    corrected, good = corrects(own), tag([item["good"] for item in own])
    kept = [
        float(logits[item["good_position"]].argmax() == labels["$KEEP"])
        for item, logits in zip(own, good, strict=True)
    ]
    print(f"{kind}: wrong word corrected {interval(corrected)}")
    print(f"{'':{len(kind)}}  right word kept {interval(kept)}")
    known += [item for item, is_right in zip(own, corrected, strict=True) if is_right]

# %% [markdown]
# The homophones are corrected. Agreement is not: the model often leaves a wrong "have" or "has" as it is. It
# has no labels for present forms such as "alarms", so it finds almost no error in the pairs of BLiMP
# themselves. The explanations below are of the sentences that the model corrects.

# %%
bad = [torch.tensor(tokenizer(pair["sentence_bad"].replace(".", " ."))["input_ids"]) for pair in pairs]
flagged = [float((logits.argmax(-1) != labels["$KEEP"]).any()) for logits in tag(bad)]
print(f"wrong sentences of BLiMP with any correction: {interval(flagged)}")
print(
    "corrected:", {kind: sum(item["kind"] == kind for item in known) for kind in ("homophone", "agreement")}
)

# %% [markdown]
# ## One correction
#
# The target is the logit of one edit at one token. `lm.targets.hf_classifier` takes the wrapped model itself.
# The map below hides one token at a time, and measures how much the logit falls.


# %%
def explain(item, of="logit"):
    """Return the target of an item: its correction, at the wrong word."""
    return lm.targets.hf_classifier(model, item["label"], of=of, position=item["bad_position"])


item = next(item for item in known if item["label"] == "$REPLACE_than")
hidden = lm.methods.Occlusion(target=explain(item), by="mask")
m = lm.run(model, item["bad"], hidden, queries=[item["bad_position"]])
print(item["text"])
print(m.top(4))

# %% [markdown]
# ## Cue alignment
#
# Does a map rank the cue first? Each map has a row for the wrong word. Without the word itself, the full stop
# and the special tokens, the score of a sentence is 1 / the rank of the cue: 1 if it is first.
#
# Two rules need no model: the nearest word, and a random order. A map has found something only if it is
# better than both. The last column is the difference from the nearest word on the same sentences.


# %%
def rows_of(item):
    """Return one row per map: layer maps are rolled out to the input."""
    place, target = item["bad_position"], explain(item)
    layer_maps = ["attention", "value_zeroing", "attn_res_ln", "globenc"]
    asked = [*layer_maps, lm.methods.GradientAttention(target=target)]
    maps = lm.run(model, item["bad"], asked)
    rows = {f"{name} (rollout)": lm.rollout(maps[name]).scores[-1, place] for name in layer_maps}
    rows["gradient rollout"] = lm.gradient_rollout(maps["gradient_attention"]).scores[-1, place]
    asked = [lm.methods.InputGradients(target=target), lm.methods.Occlusion(target=target, by="mask")]
    inputs = lm.run(model, item["bad"], asked, queries=[place])
    rows["input gradients"] = inputs["input_gradients"].scores[0, 0]
    rows["hidden tokens"] = inputs["occlusion"].scores[0, 0]
    rows["nearest word"] = -(torch.arange(len(item["bad"])) - place).abs().double()
    return rows


def rank_of_cue(item, row):
    """Return 1 / the rank of the cue's first token among the other words."""
    left_out = {0, item["bad_position"], len(item["bad"]) - 1, len(item["bad"]) - 2}
    words = [place for place in range(len(item["bad"])) if place not in left_out]
    marks = torch.tensor([place in item["cue"] for place in words])
    return evaluation.reciprocal_rank(row[words].double(), marks)


draw = torch.Generator().manual_seed(0)
ranks = {kind: {} for kind in ("homophone", "agreement")}
for item in known:
    rows = rows_of(item)
    for name, row in rows.items():
        ranks[item["kind"]].setdefault(name, []).append(rank_of_cue(item, row))
    drawn = [rank_of_cue(item, torch.rand(len(item["bad"]), generator=draw)) for _ in range(50)]
    ranks[item["kind"]].setdefault("random order", []).append(sum(drawn) / len(drawn))
for kind, by_map in ranks.items():
    print(kind)
    for name, values in by_map.items():
        difference = interval(values, by_map["nearest word"])
        print(f"  {name:24s} {interval(values)}" + f"; minus nearest {difference}" * (name != "nearest word"))

# %% [markdown]
# ## Which heads are needed?
#
# The importance of a head is the largest score of its attribution map, averaged over sentences. The three
# baselines are the largest attention weight, a Taylor expansion of the log probability, and random orders.
# The heads are removed from the least important one on, and the metric is the share of corrections that
# remain, on sentences that were not used for the ranking.

# %%
random.Random(0).shuffle(known)
explained, others = known[:6], known[6:]
prompts = [item["bad"] for item in explained]
quick = lm.methods.AttentionAttribution(n_steps=4, method="riemann_left", per_head=True)
attribution = experiments.head_importance(
    model, prompts, targets=[explain(item, "probability") for item in explained], method=quick
)
losses = [explain(item, "log_probability") for item in explained]
rankings = {
    "attribution": attribution,
    "attention": experiments.head_importance(model, prompts, "attention"),
    "Taylor": experiments.head_importance(model, prompts, "taylor", targets=losses),
}
for name, importance in rankings.items():
    strongest = ", ".join(f"head {head} of layer {layer}" for layer, head, _ in importance.top(3))
    print(f"{name:12s} {strongest}")


def remaining(model):
    """Return the share of corrections that the model with its present hooks still makes."""
    answers = corrects(others, model)
    return sum(answers) / len(answers)


shares = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
curves = experiments.pruning_curves(model, remaining, rankings, fractions=shares, random=3)
curves.show(metric="corrections that remain", title=f"{len(others)} other sentences")

# %% [markdown]
# At one share, the rankings are compared sentence by sentence. An interval that contains 0 means that these
# sentences cannot decide between the two.

# %%
half = len(rankings["attribution"].ranking()) // 2
answers = {}
for name, importance in rankings.items():
    with experiments.pruned(model, importance.ranking()[:half]):
        answers[name] = corrects(others)
orders = [random.Random(seed).sample(rankings["attribution"].ranking(), 2 * half) for seed in range(3)]
by_order = []
for order in orders:
    with experiments.pruned(model, order[:half]):
        by_order.append(corrects(others))
answers["random"] = [sum(each) / len(each) for each in zip(*by_order, strict=True)]
print(f"corrections that remain without {half} of {2 * half} heads")
for name, values in answers.items():
    compared = (
        ""
        if name == "attribution"
        else f"; attribution minus this {interval(answers['attribution'], values)}"
    )
    print(f"  {name:12s} {interval(values)}{compared}")

# %% [markdown]
# ## A tree
#
# The tree starts at the wrong word in the top layer, where the correction is read. Through each layer, a
# token of the tree adds the tokens with a large score. The target is the logit here. The importance of heads
# above used the probability, as the paper does.

# %%
item = next(item for item in known if item["label"] == "$REPLACE_than")
m = lm.run(model, item["bad"], lm.methods.AttentionAttribution(target=explain(item)), progress=None)
tree = lm.attribution_tree(m, root=item["bad_position"])
print(item["text"])
print(lm.aggregation.tree_text(tree))
tree_figure(tree, title=f"Attribution tree of {item['label']}")

# %% [markdown]
# ## Triggers
#
# The strongest entries of a correction name a few words. If these words make the model see an error, copying
# them into right sentences at the same relative positions makes it see one there. Random words at the same
# places are the control, because any foreign word may look like an error.

# %%
special = [tokenizer.cls_token_id, tokenizer.sep_token_id]
sources = [experiments.Example(tuple(item["bad"].tolist()), "error") for item in explained]
clean = [experiments.Example(tuple(item["good"].tolist()), "no error") for item in others[:24]]
triggers = experiments.extract_triggers(
    model,
    sources,
    targets=[explain(item) for item in explained],
    method=quick,
    special=special,
)


def predict(examples):
    """Return whether the model has a correction for any token of each example."""
    answers = tag([torch.tensor(example.tokens) for example in examples])
    return ["error" if (each.argmax(-1) != labels["$KEEP"]).any() else "no error" for each in answers]


def still_clean(triggers):
    """Return, per trigger, the share of right sentences in which the model still sees no error."""
    report = experiments.trigger_report(clean, triggers, predict, special=special)
    return [after for _, label, _, _, after in report.rows if label == "no error"]


pool = [token for example in clean for token in example.tokens if token not in special]
draw_word = random.Random(0)
noise = [
    dataclasses.replace(
        trigger,
        pieces=tuple(dataclasses.replace(piece, token=draw_word.choice(pool)) for piece in trigger.pieces),
    )
    for trigger in triggers
]
for trigger in triggers[:3]:
    print(trigger)
before = [float(answer == "no error") for answer in predict(clean)]
print(f"right sentences without a correction: {interval(before)}")
with_triggers, with_noise = still_clean(triggers), still_clean(noise)
print(f"still without one, with a trigger: {interval(with_triggers)} triggers")
print(f"still without one, with random words: {interval(with_noise)}")
print(f"random words minus triggers: {interval(with_noise, with_triggers)}")

# %% [markdown]
# ## What to keep in mind
#
# - A rule without a model is a strong baseline: the nearest word is often the cue. On homophones, the
#   rollouts of `attn_res_ln` and `globenc` beat it, the rollout of Value Zeroing was worse, and the other
#   maps are undecided. On agreement, `attn_res_ln`, `globenc` and input gradients always put the cue first.
# - Half of the heads could be removed in the order of attribution without losing a correction. That is better
#   than the Taylor expansion and random orders. Against attention weights it is undecided.
# - The sentences are short and of few patterns, and the agreement sentences differ in their subjects only.
#   The intervals are about sentences like these, not about English.
# - The model corrects all wrong homophones, so the explained sentences are easy ones.
# - The triggers are often the wrong word itself, so they show what the model looks at, and not a bias of its
#   training data. They caused more corrections than random words, but they are six, and the random words were
#   drawn once.
#
# ## Exercises
#
# 1. The tree of the correction may contain [SEP]. Hide [SEP] and the cue, one at a time: which one does the
#    correction need?
# 2. Does the order of the heads change with the target? Compare the importance by probability with that by
#    logit.
#
# ## Answers
#
# 1. It needs both, as the figures below show. A token without a word, such as [SEP], can be a part of what
#    the model computes. But the model was never trained without it, so its effect may be an artefact.
# 2. It does in part: the last figure below is the rank correlation of the two, on the same six sentences.

# %%
m = lm.run(
    model, item["bad"], lm.methods.Occlusion(target=explain(item), by="mask"), queries=[item["bad_position"]]
)
row = dict(zip(m.tokens, m.scores[0, 0].tolist(), strict=True))
chances = lm.run(
    model,
    item["bad"],
    lm.methods.Occlusion(target=explain(item, "probability"), by="mask"),
    queries=[item["bad_position"]],
)
lost = dict(zip(chances.tokens, chances.scores[0, 0].tolist(), strict=True))
for token in ("[SEP]", m.tokens[item["cue"][0]]):
    print(f"1. without {token!r}: the logit falls by {row[token]:.2f}, the probability by {lost[token]:.2f}")

by_logit = experiments.head_importance(
    model, prompts, targets=[explain(one) for one in explained], method=quick
)
agreement = evaluation.spearman(by_logit.scores.flatten(), rankings["attribution"].scores.flatten())
print(f"2. rank correlation of the two orders: {agreement:.2f}")
