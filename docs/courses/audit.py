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
# # Audits: can I trust this answer?
#
# Take this course if you want to check an answer against its documents. You learn what each verdict of
# `lm.audit` means, how it is measured, and when it misleads.
#
# **Level:** you know what a log probability is. **Time:** 15 minutes, and 10 for the exercises.
# **Papers:**
#
# - Cohen-Wang et al., "ContextCite: Attributing Model Generation to Context", NeurIPS 2024, arXiv 2409.00729.
# - Cohen-Wang et al., "Learning to Attribute with Attention" (AT2), 2025, arXiv 2504.13752.
#
# In this course you compute an audit by hand, read one story of each verdict, count the passes of the search,
# and see verdicts that mislead.

# %% [markdown]
# ## A ranking is not an answer
#
# The model is SmolLM2-135M-Instruct. The next cell loads it without a hub, and works in the folder of the
# repository. With a hub, write
# `TransformerBridge.boot_transformers("HuggingFaceTB/SmolLM2-135M-Instruct")`.
#
# Two documents say who leads a clinic. `top` ranks the sentences by their scores, and `verify` measures what
# the name loses without each.

# %%
import pandas as pd
import torch

import lens_mix as lm
from demos import models
from lens_mix.traces.removals import find_blocking

model = models.demo_model()
clinic = {
    "website": "The clinic is on Harbor Street. Lena Vogt has led it since 2015.",
    "leaflet": "Lena Vogt is the head of the clinic. It opens at eight in the morning.",
}
prompt = lm.Documents(clinic, "Who leads the clinic?")
t = lm.trace(model, prompt, answer="The clinic is led by Lena Vogt.")
print(t["Lena Vogt"].top(4))
print(t["Lena Vogt"].verify(4))

# %% [markdown]
# Some sentence is always first in a ranking, even if none is needed. The losses do not help either: without
# any one sentence, the name loses less than 1 nat, as if it came from none of them. ContextCite and AT2 learn
# rankings from random deletions, but one score for each sentence cannot describe "one of these two is
# enough". So an audit removes *sets* of sentences.

# %% [markdown]
# ## By hand
#
# Delete the tokens of some sentences from the prompt, and compute the log probability of every written token
# again. Here are four such passes: without each of the two sentences that have the name, without both, and
# without all four. The question stays. Of five or more sentences, the one with the lowest score stays, too:
# after no text at all, a model reads a question in another way.


# %%
@torch.no_grad()
def log_probabilities(removed=()):
    """Return the log probability of each written token without some sources."""
    deleted = {place for source in removed for place in source.positions}
    tokens = t.reading.ids[[place for place in range(len(t.tokens)) if place not in deleted]]
    n_written = len(t.tokens) - t.n_prompt
    rows = model(tokens[None])[0, -n_written - 1 : -1].log_softmax(-1)
    return rows.gather(-1, tokens[-n_written:, None])[:, 0]


sentences = [source for source in t.sources() if source.kind == "document"]
website, leaflet = (source for source in sentences if "Vogt" in source.text)
removals = {
    "website's": [website],
    "leaflet's": [leaflet],
    "both": [website, leaflet],
    "all four": sentences,
}
losses = {name: log_probabilities() - log_probabilities(removed) for name, removed in removals.items()}
table = pd.DataFrame({name: lost.tolist() for name, lost in losses.items()}).round(2) + 0.0
table.insert(0, "token", t.tokens[t.n_prompt :])
table

# %% [markdown]
# A number is the loss of a token's log probability, in nats. A column is for what was removed. Without one of
# the two sentences, no token loses much. Without both, the name loses as much as without all four. So each of
# the two is enough: the claim is *redundant*.

# %% [markdown]
# ## Decisive tokens
#
# Most tokens lose little in any column, and some gain. In a long claim, their sum would hide what the name
# loses. So an audit compares only the *decisive* tokens. A word's tokens are decisive if one of them loses at
# least 1 nat without all sources, and at least half of the largest loss in the claim. Words that the question
# has do not count: they repeat it.

# %%
lost = losses["all four"].tolist()
words = []
for place, token in enumerate(t.tokens[t.n_prompt :]):
    if place == 0 or token.startswith(" "):
        words.append([])
    if token != ".":
        words[-1].append(place)
asked = {"who", "leads", "the", "clinic"}
words = [word for word in words if t.text_of(word[0], word[-1] + 1).strip().lower() not in asked]
least = max(1.0, max(lost) / 2)
decisive = tuple(place for word in words if max(lost[each] for each in word) >= least for place in word)
print("decisive:", [t.tokens[t.n_prompt + place] for place in decisive])

# %% [markdown]
# ## Equal to the library
#
# `t.audit()`, or `lm.audit(model, prompt, answer=…)`, does this for each claim. By default, a claim is a
# sentence of the answer.

# %%
found = t.audit()
claim = found[0]
assert claim.decisive == decisive
assert abs(claim.memory.loss - losses["all four"][list(decisive)].sum()) < 1e-3
assert abs(claim.grounds[0].loss - losses["both"][list(decisive)].sum()) < 1e-3
for each in claim.alone:
    by_hand = log_probabilities() - log_probabilities(each.sources)
    assert abs(each.loss - by_hand[list(decisive)].sum()) < 1e-3
print("equal to the library")
print(found)

# %% [markdown]
# Below the claim is its loss without any source, and what the model would write without the sentences that
# follow. The words in quotes are those that rest on a sentence. "With it alone" is how much of the whole loss
# is avoided if only this sentence stays.
#
# This was the story of *redundant*: you learn that the website and the leaflet both say it. Here is one of
# each other verdict.
#
# ## Supported
#
# A tenant asks about the rent, and the answer comes from one sentence of the lease.


# %%
def audit(documents, question, answer, spans=None):
    """Audit an answer about documents, and print it."""
    print(lm.audit(model, lm.Documents(documents, question), answer=answer, spans=spans))


lease = {
    "lease": "The lease begins on 1 October. The rent is 940 euros a month and is due on the third day.",
    "house rules": "Quiet hours begin at ten. Bicycles belong in the cellar.",
}
audit(lease, "How much is the rent?", "The rent is 940 euros a month.")

# %% [markdown]
# You learn which sentence to read: nothing else in the two documents matters for the number.
#
# ## Conflicting
#
# An offer and an invoice have different prices for the same chairs.

# %%
chairs = {
    "offer": "We can deliver forty oak chairs. The price is 120 euros per chair.",
    "invoice": "Forty oak chairs, delivered on 9 May. The price is 135 euros per chair.",
}
audit(chairs, "What is the price of a chair?", "The price of a chair is 120 euros.")

# %% [markdown]
# You learn that two documents disagree, and where. Which price is right is not measured. This model reads a
# number digit by digit, so "against" shows the digits from the one on in which the prices differ.
#
# ## From memory
#
# A search for "capital of France" returned two texts without an answer. The model answers anyway.

# %%
trip = {
    "travel notes": "We arrived in France on a Friday. The train was late. The hotel was near the river.",
    "receipt": "Two nights, 240 euros. Paid in cash.",
}
audit(trip, "What is the capital of France?", "The capital of France is Paris.")

# %% [markdown]
# You learn that these documents are not the reason for the answer, although it is true: without them, no word
# of it is much less probable. To cite a source, find another one.
#
# ## Unclear
#
# The second sentence of the next answer is made up: no document says how many beds there are.

# %%
audit(clinic, "When does the clinic open?", "It opens at eight in the morning. The clinic has 300 beds.")

# %% [markdown]
# The model itself would hardly write this number, with or without the documents. The loss of such a word is
# mostly noise, so the audit does not decide. You learn which sentence to check yourself.
#
# A claim is also *unclear* if the sources make another word much more probable, if its loss lies between two
# verdicts, or if the search needs too many passes. The reason is printed.

# %% [markdown]
# ## How the search works
#
# An audit looks for a small set of sentences without which the claim loses half of what it loses without all.
#
# 1. It removes the sentences with the highest scores: one, then two, four, eight, until half is lost.
# 2. It tries the number in the middle between the last two, until one sentence makes the difference.
# 3. If the sentences found so far are not enough, they stay removed, and the search starts again.
#
# Each sentence of the set takes a number of passes that grows with the logarithm of the number of sentences.
# The next cell counts passes for a loss that we choose. The sentences to find have the lowest scores, which
# is the worst case.


# %%
def count_passes(n, needed):
    """Return how many passes it takes to find the needed sentences of n, and what was removed in each."""
    tried = []

    def loss(removed):
        tried.append(len(removed))
        return 10.0 if needed <= set(removed) else 0.0

    assert set(find_blocking(loss, range(n), 5.0, 4)) == needed
    return tried


print("one of 16, removed in each pass:", count_passes(16, {15}))
pd.DataFrame(
    {
        "sentences": n,
        "one needed": len(count_passes(n, {n - 1})),
        "each of two is enough": len(count_passes(n, {n - 2, n - 1})),
        "each sentence and each pair": n + n * (n - 1) // 2,
    }
    for n in (8, 16, 32, 1024)
)

# %% [markdown]
# A real audit takes a few more passes, for example to measure single sentences. Here is a ship's log of 8, 16
# and 32 sentences, one of which has the answer.

# %%
rows = []
for n in (8, 16, 32):
    log = [f"Day {day}: the wind came from the {'north' if day % 2 else 'west'}." for day in range(1, n)]
    log.insert(n // 2, "The captain of the Aurora is Marta Lind.")
    ship = lm.Documents({"log": " ".join(log)}, "Who is the captain of the Aurora?")
    found = lm.audit(model, ship, answer="The captain of the Aurora is Marta Lind.")
    assert "captain" in found[0].sources[0].text
    rows.append({"sentences": n, "passes": found.passes, "verdict": found[0].verdict})
pd.DataFrame(rows)

# %% [markdown]
# The scores rank the right sentence first each time, so the number of passes does not grow at all.
#
# ## What an audit cannot show
#
# **A false claim is only unclear.** The next answer has the wrong month. The audit does not call it false: it
# prints the word that the model would rather write.

# %%
phone = {"press release": "The new phone has a battery that lasts three days. It will be sold from May."}
for spans in (None, ["June"]):
    audit(phone, "When will the phone be sold?", "The phone will be sold from June.", spans)

# %% [markdown]
# **A sentence about something else may look like evidence.** The next answer comes from one sentence. Another
# one is about another town, and the audit counts it as a source, too. The numbers show which of the two
# matters: compare the losses, and "with it alone".

# %%
power = {
    "about us": "Northwind Power was founded in Bergen in 1998. It builds small turbines for farms.",
    "news": "The company opened an office in Oslo in May. It has 412 employees.",
}
audit(power, "Where was Northwind Power founded?", "Northwind Power was founded in Bergen.")

# %% [markdown]
# Such a sentence may also look like a contradiction, because without the real source the model may write the
# other town.
#
# **A conflict may be missed.** Two editions of a newspaper name different causes of a fire. The verdict is
# not *conflicting*, because this model prefers the other edition. The reason shows the conflict.

# %%
paper = {
    "morning": "A fire damaged the old tannery. The fire chief thinks that a faulty heater was the cause.",
    "evening": "The police now say that the fire was caused by a cigarette. Nobody was hurt.",
}
audit(paper, "What caused the fire?", "The fire was caused by a cigarette.")

# %% [markdown]
# **A true claim may be unclear.** If this model would choose another word, a claim is *unclear*, even if it
# is a copy of its source.
#
# **A verdict is about this model.** Another model may need another sentence, or none. If a source is wrong, a
# claim that copies it is still *supported*.
#
# ## What to keep in mind
#
# - Read the words in quotes first, because a verdict is about them.
# - What the model would write instead may show a conflict that the verdict misses.
# - *Supported*: read that one sentence. *Unclear* and *from memory*: check the claim elsewhere.
#
# ## Exercises
#
# 1. Delete the leaflet's sentence about Lena Vogt. Which verdict do you expect for "The clinic is led by Lena
#    Vogt."?
# 2. One sentence has two facts: "The clinic is led by Lena Vogt and opens at eight." Audit the sentence, and
#    then each fact as a claim of its own.

# %% [markdown]
# ## Answers
#
# 1. *Supported*: the other sentence is needed now.
# 2. The whole sentence is *unclear*, because the model would continue it in another way. As claims of their
#    own, the name is *redundant*, and the hour is *supported*.

# %%
one = {**clinic, "leaflet": "It opens at eight in the morning."}
audit(one, "Who leads the clinic?", "The clinic is led by Lena Vogt.")

facts = "The clinic is led by Lena Vogt and opens at eight."
for spans in (None, ["Lena Vogt", "eight"]):
    audit(clinic, "Who leads the clinic, and when does it open?", facts, spans)
