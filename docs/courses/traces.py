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
# # Traces: which sentence did a written span come from?
#
# Take this course if you want to know which sentence of a document an answer came from. You also learn to
# check it, by measuring what the answer loses without that sentence.
#
# **Level:** you know what a log probability and a gradient are. **Time:** 40 minutes with the exercises.
# **Papers:**
#
# - Cohen-Wang et al., "ContextCite: Attributing Model Generation to Context", NeurIPS 2024.
# - Cohen-Wang et al., "Learning to Attribute with Attention" (AT2), 2025, arXiv 2504.13752.
# - Walker and Ewetz, "Explaining the Reasoning of Large Language Models Using Attribution Graphs" (CAGE),
#   2025, arXiv 2512.15663.
# - Pan et al., "Towards Long-Horizon Interpretability: Efficient and Faithful Multi-Token Attribution for
#   Reasoning LLMs" (FlashTrace), ICML 2026.
#
# A map explains the next token by tokens. A reader of an answer asks another question: from which sentence
# did these words come, and would the model have written them without it? `lm.trace` answers the first part
# with a map, and checks the second part by removing sentences. In this course you will
#
# 1. compute a trace by hand: one pass, one gradient, one sum for each sentence,
# 2. check it by deleting each sentence, and compare it with raw attention and a rollout,
# 3. follow an answer through what the model wrote before it,
# 4. see what a trace cannot show.

# %% [markdown]
# ## The model and its documents
#
# The model is SmolLM2-135M-Instruct. The next cell loads it without a hub, and works in the folder of the
# repository. With a hub, write
# `TransformerBridge.boot_transformers("HuggingFaceTB/SmolLM2-135M-Instruct")`.
#
# The prompt has two documents and a question. `lm.Documents` writes them with the model's chat template.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

import lens_mix as lm
from demos import models
from lens_mix.evaluation import spearman

plt.style.use(lm.view.STYLE)
model = models.demo_model()
report = {
    "annual report": "The company was founded in 1998. It has 120 employees. Its main office is in Oslo.",
    "press release": "The new phone has a battery that lasts three days. It will be sold from May.",
}
question = "Where is the main office of the company?"
t = lm.trace(model, lm.Documents(report, question), generate=24)
print(t.text)

# %% [markdown]
# `t.tokens` has the tokens of the prompt, and then those that the model wrote. The sources are a partition of
# these tokens. By default they are sentences. What the chat template adds is a source too.

# %%
for source in t.sources():
    print(f"{len(source.positions):3d} tokens  {source}")

# %% [markdown]
# ## By hand
#
# We explain one number: the log probability of a span, after everything before it. The span has the tokens a
# to b, and
#
#     F = Σ over i from a to b of log p(token i | the tokens before i)
#
# One pass over the prompt and the answer computes all terms, because row i − 1 of the logits predicts
# token i. A simple score of a token is its embedding times the gradient of F with respect to it. A sentence
# has the sum of its tokens' scores.

# %%
span = t["located in Oslo"]
tokens = t.reading.ids
store = {}


def keep(embeddings, hook):
    """Make the embeddings the start of the gradient."""
    store["embeddings"] = embeddings.detach().requires_grad_()
    return store["embeddings"]


def log_probability(tokens, start, stop):
    """Return the log probability of the tokens from `start` to before `stop`."""
    logits = model.run_with_hooks(tokens[None], fwd_hooks=[("hook_embed", keep)])
    rows = logits[0, start - 1 : stop - 1].log_softmax(-1)
    return rows.gather(-1, tokens[start:stop, None]).sum()


first, last = span.positions[0], span.positions[-1]
value = log_probability(tokens, first, last + 1)
(gradient,) = torch.autograd.grad(value, store["embeddings"])
by_hand = (gradient * store["embeddings"])[0].sum(-1).detach()
print(f"{span.text!r}: log probability {value:.3f}")

# %% [markdown]
# ## Equal to the library
#
# The method `input_gradients` with `score="times_input"` is this definition. `lm.trace` gives it the log
# probability of the span as its target.

# %%
times_input = lm.methods.InputGradients(score="times_input")
same = lm.trace(model, lm.Documents(report, question), answer=tokens[t.n_prompt :], method=times_input)
assert abs(span.log_probability - value.item()) < 1e-4
torch.testing.assert_close(same[span.start : span.stop].scores, by_hand, rtol=1e-2, atol=1e-3)
for source, entry in zip(t.sources(), same["located in Oslo"].map.scores[0, 0], strict=False):
    assert abs(by_hand[list(source.positions)].sum() - entry) < 1e-3
print("equal to the library")

# %% [markdown]
# By default `lm.trace` runs the method with the best evidence instead. It can run every map of the library.
# A method with a target takes one backward pass for each span. Layer maps are combined by an aggregation, and
# the rows that predict the span are summed.

# %%
print("default method:", t.method_name)
print(span.top(4))
print("gradient × embedding")
print(same["located in Oslo"].top(4))

# %% [markdown]
# ## Would it be gone without the sentence?
#
# A score is an estimate. To measure, delete the tokens of a sentence from the prompt, and compute the log
# probability of the same words again. The difference is the loss. `verify` does this for the strongest
# sentences, one pass for each.


# %%
@torch.no_grad()
def loss_without(trace, span, positions):
    """Return what a span loses if tokens of the prompt are deleted."""
    keeps = [place for place in range(len(trace.tokens)) if place not in positions]
    start, stop = keeps.index(span.positions[0]), keeps.index(span.positions[-1]) + 1
    return span.log_probability - log_probability(trace.reading.ids[keeps], start, stop).item()


for each in span.verify(4):
    assert abs(each.loss - loss_without(t, span, each.source.positions)) < 1e-3
print("equal to the library")
print(span.verify(4))

# %% [markdown]
# ## Compare maps
#
# Now four questions about three texts. For each, the model writes an answer, and we measure what it loses
# without each sentence of the text. A map is good if it ranks the sentences in this order. The table compares
#
# - the default of `lm.trace`,
# - the gradient from above,
# - raw attention, as a mean over layers, and the rollout of attention.
#
# The controls know nothing about the model: the number of tokens of a sentence, because a sum over more
# tokens is often higher, and its position. Each text has long sentences that no question asks about.

# %%
museum = "It is closed on Mondays. Tickets cost twelve euros. Most visitors come by bus from the old town."
letter = "The flat has three rooms. Ingrid plays the cello. It is a long way to the bakery where I work now."
recipe = "Fry the onions in butter. Boil the potatoes for twenty minutes. Bake it all in a wide, flat dish."
asked = [
    (museum, "How much do tickets cost?"),
    (letter, "What does Ingrid play?"),
    (letter, "How many rooms does the flat have?"),
    (recipe, "How long are the potatoes boiled?"),
]
compared = {
    "default of lm.trace": {},
    "gradient × embedding": {"method": times_input},
    "attention, mean": {"method": "attention", "aggregation": "mean"},
    "attention, rollout": {"method": "attention", "aggregation": "rollout"},
}
others = " The garden behind the house is open to everyone on every day of the week. Write to us soon."
cases = []
for text, question in asked:
    prompt = lm.Documents({"text": text + others}, question)
    whole = lm.trace(model, prompt, generate=16)
    sentences = [source for source in whole.sources() if source.kind == "document"]
    losses = torch.tensor([loss_without(whole, whole[:], source.positions) for source in sentences])
    print(f"{question:35s}{whole.text}")
    lengths = torch.tensor([float(len(source.positions)) for source in sentences])
    position = torch.tensor([float(source.positions[0]) for source in sentences])
    scores = {"control: tokens": lengths, "control: position": position}
    for name, options in compared.items():
        answer = whole.reading.ids[whole.n_prompt :]
        other = lm.trace(model, prompt, answer=answer, **options) if options else whole
        scores[name] = torch.stack([other[:].scores[list(each.positions)].sum() for each in sentences])
    cases.append((scores, losses, lengths))

# %%
rows = {}
for name in ["control: tokens", "control: position", *compared]:
    ranks = [spearman(scores[name], losses) for scores, losses, _ in cases]
    first = sum(bool(scores[name].argmax() == losses.argmax()) for scores, losses, _ in cases)
    rows[name] = {
        "mean rank correlation": f"{np.mean(ranks):+.2f}",
        "right first": f"{first} of {len(cases)}",
    }
pd.DataFrame(rows).T

# %% [markdown]
# "Right first" counts how often the map has the sentence with the largest loss first. In the figure, a point
# is a sentence. Points at the top are sentences that the answer needs. A good map has them at the right.

# %%
figure, panels = plt.subplots(1, len(compared), figsize=(9.5, 2.6), sharex=True, sharey=True)
for panel, name in zip(panels, compared, strict=True):
    for scores, losses, _ in cases:
        panel.scatter(scores[name].abs() / scores[name].abs().sum(), losses, s=14, color="C0")
    panel.set_title(name, fontsize=9)
    panel.set_xlabel("share of the text's scores", fontsize=8)
panels[0].set_ylabel("loss in nats", fontsize=8)
plt.show()

# %% [markdown]
# The first answer is wrong. A trace explains what the model wrote, right or wrong. Four questions show how
# the comparison works, and not which map is better.
#
# ContextCite and AT2 also use deletions. ContextCite deletes random sets of sentences and fits a linear model
# to the effects (exercise 2). AT2 learns one weight for each attention head from such deletions, and then
# needs none.

# %% [markdown]
# ## Through what was written before
#
# A model also reads what it wrote itself. If it first writes an intermediate result, the answer may come from
# there. The answer below has two steps. The last word repeats a word that the model has already written.

# %%
firm = {
    "staff": "Maria's manager is Pedro. Anna's manager is Jonas.",
    "offices": "Pedro works in Lisbon. Jonas works in Madrid.",
}
steps = "Maria's manager is Pedro. Pedro works in Lisbon. So the answer is Lisbon"
chain = lm.trace(model, lm.Documents(firm, "In which city does Maria's manager work?"), answer=steps)
print(chain[-1].top(9, everything=True))

# %% [markdown]
# Let A be the matrix of shares: row r has the magnitudes of written token r's scores, scaled to sum 1. It has
# two parts. A_gp has the columns of the prompt, and A_gg those of the written tokens. A written token is
# replaced by its own sources, and these by theirs, until all are in the prompt:
#
#     X = A_gp + A_gg A_gp + A_gg² A_gp + … = (I − A_gg)⁻¹ A_gp
#
# A_gg has entries only below its diagonal, so the sum ends, and all rows of X sum to 1. CAGE computes this
# influence. FlashTrace follows it for a fixed number of steps, called hops.

# %%
shares = np.abs(chain.steps.scores[0].double().numpy())
shares /= shares.sum(-1, keepdims=True)
to_prompt, to_written = shares[:, : chain.n_prompt], shares[:, chain.n_prompt :]
assert np.allclose(to_written, np.tril(to_written, -1))
influence = np.linalg.solve(np.eye(len(shares)) - to_written, to_prompt)
through = chain.through()
for number in range(len(shares)):
    assert np.allclose(through[number].scores[: chain.n_prompt], influence[number])
print("equal to the library; the rows sum to", np.unique(influence.sum(-1).round(6)))

# %%
rows = {}
for hops in (0, 1, 2, None):
    scores = chain.through(hops)[-1].scores
    row = {s.text: scores[list(s.positions)].sum().item() for s in chain.sources() if s.kind == "document"}
    rows["all" if hops is None else str(hops)] = {**row, "everything": scores.sum().item()}
pd.DataFrame(rows).T.rename_axis("hops").round(3)

# %% [markdown]
# With every hop, more of the last word's row reaches the prompt ("everything"), so all sentences gain. The
# first hop adds the most. The answer needs two sentences, "Maria's manager is Pedro." and "Pedro works in
# Lisbon." Compare how much they gain with how much the other two gain: a sum over all paths also adds those
# that the answer does not need.

# %% [markdown]
# ## What a trace cannot show
#
# **Two passages that say the same.** If one of them is deleted, the other is still there. The loss of each is
# small, and that of both together is large. A map divides the score between them.

# %%
twice = {
    "annual report": "The company was founded in 1998. Its main office is in Oslo.",
    "web page": "Welcome to our company. The main office is in Oslo. Write to us.",
}
prompt = lm.Documents(twice, "Where is the main office?")
double = lm.trace(model, prompt, answer="The main office is in Oslo")
oslo = double[-1]
sentences = [source for source in double.sources() if source.kind == "document"]
both = [source.positions for source in sentences if "Oslo" in source.text]
print(oslo.top(2))
print(f"lost without the first sentence: {loss_without(double, oslo, both[0]):+.2f} nats")
print(f"lost without the second:         {loss_without(double, oslo, both[1]):+.2f} nats")
print(f"lost without both:               {loss_without(double, oslo, [*both[0], *both[1]]):+.2f} nats")

# %% [markdown]
# **What the model knows itself.** Shares sum to 1, so some sentence always has the largest. The next answer
# is in no document, but the trace lists sentences of documents too. Their losses show that none of them is
# needed.

# %%
prompt = lm.Documents(report, "What is the capital of France?")
known = lm.trace(model, prompt, answer="The capital is Paris")
print(known[-1].verify(5))

# %% [markdown]
# **Length.** The score of a sentence is the sum of its tokens' scores, so a long sentence that is not needed
# may have a higher score than a short one that is. So compare a map with the number of tokens, as in the
# table above.
#
# ## What to keep in mind
#
# - A share shows where to look. The loss shows whether the words need the sentence.
# - Deletion also changes the text: a pronoun may lose its noun, and later tokens move. A loss is the answer
#   to one exact question, and not the only one that can be asked.
# - The span matters. The whole answer, a word and a token have different sources.
# - The text that is written before the span is given. `through` follows it down to the prompt.
#
# ## Exercises
#
# 1. Which *tokens* of its sentence did "Oslo" come from? Use `by("token")`.
# 2. Compute ContextCite in a few lines: delete random sets of sentences, and fit a linear model to the log
#    probability of "located in Oslo". Do its weights agree with the loss of each single sentence?
# 3. Divide the default's scores of the four questions by the number of tokens. Is the right
#    sentence first more often?
# 4. How much of each written token came from the documents? Use `context_share()`.

# %% [markdown]
# ## Answers
#
# 1. `by` divides the same scores into other sources, and computes nothing again.
# 2. They agree about the sentence that decides. A linear model adds the effects of sentences, so it cannot
#    describe two sentences that say the same. The paper fits the logit of the probability with a lasso, so
#    that few sentences have a weight.
# 3. The run prints both counts. A mean is fair to short sentences, but it hides a long one with one word that
#    matters. With sums, a document has the score of its sentences together.
# 4. "Oslo" has the largest share in the documents. The other columns of the table are the question, the
#    template and the text that was written before.

# %%
for each in t.by("token")["Oslo"].top(3):
    print(f"1. {each.source.text!r} at {each.source.positions[0]}: share {each.share:.2f}")

draw = torch.Generator().manual_seed(0)
sentences = [source for source in t.sources() if source.kind == "document"]
kept = torch.rand(16, len(sentences), generator=draw) < 0.5
changes = []
for row in kept.tolist():
    deleted = [source.positions for source, is_kept in zip(sentences, row, strict=True) if not is_kept]
    changes.append(-loss_without(t, span, sum(deleted, ())))
design = torch.cat([kept.double(), torch.ones(len(kept), 1).double()], 1)
weights = torch.linalg.lstsq(design, torch.tensor(changes).double()[:, None]).solution[:-1, 0]
for source, weight in zip(sentences, weights.tolist(), strict=True):
    loss = loss_without(t, span, source.positions)
    print(f"2. weight {weight:+.2f}, loss of the sentence alone {loss:+.2f}: {source.text}")

name = next(iter(compared))
sums = sum(bool(scores[name].argmax() == losses.argmax()) for scores, losses, _ in cases)
means = sum(bool((scores[name] / n).argmax() == losses.argmax()) for scores, losses, n in cases)
print(f"3. right first: sums {sums}, means {means} of {len(cases)}")

print("4.")
print(t.context_share().nlargest(5, "document").round(2).to_string(index=False))
