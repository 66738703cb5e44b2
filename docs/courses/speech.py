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
# # Speech: which sound was a word read from?
#
# Take this course if you want to know which moments of a recording Whisper used for a word of its transcript.
# You also learn to check it, by silencing these moments.
#
# **Level:** you know what an encoder, a decoder and cross-attention are. **Time:** 20 minutes with the
# exercises. **Papers:** Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision"
# (Whisper), ICML 2023; Mohebbi et al., "Homophone Disambiguation Reveals Patterns of Context Mixing in Speech
# Transformers", EMNLP 2023; Kobayashi et al., "Attention is Not Only a Weight", EMNLP 2020.
#
# Whisper's encoder reads fifty frames a second, and its decoder writes tokens. Each token is predicted in
# the row of the token before it. In this course you will
#
# 1. trace a transcript to stretches of the recording,
# 2. see which layers read the word that comes next, and which the word that was just read,
# 3. find when each word was said, and compare it with the truth,
# 4. silence a stretch, and measure what a word loses.

# %% [markdown]
# ## The model and the recording
#
# The model is Whisper base. With a hub, load it as [the recipe](../how_to/speech.md) does. The recording is
# synthetic, so we know when each word begins.

# %%
import lens_mix as lm
from demos import models, speech

model = models.whisper()
recording = speech.read_recording()
sound = recording.samples
print(f"{len(sound) / recording.rate:.2f} seconds")

# %% [markdown]
# ## What did it hear, and where?
#
# `lm.trace` lets the model write, and gives every written word the stretches of sound it was read from.

# %%
t = lm.trace(model, sound, generate=40)
print(t.text)
t["horses"].top(3)

# %% [markdown]
# It heard "farmer's old" instead of "farmer sold", which sounds almost the same. "horses" was said between
# 2.17 and 2.70 s, and so the strongest stretches are right. More than a third of the row is padding: Whisper
# always reads a window of 30 seconds, and attends to its empty part as other models do to their first token.
#
# ## Which layers?
#
# The rows of value norms (attention weights times the values' norms), under the waveform. The row is that of
# " brown", where " horses" is predicted.

# %%
text = " The old farmer sold seven brown horses to a doctor from London."
m = lm.run(model, (sound, text), "value_norm", part="cross")
m.show(query=" brown")

# %% [markdown]
# The lower three layers read "brown", the word that has just been read. The upper three read "horses", the
# word that comes next. A mean over all layers mixes the two, so a trace of sound takes the upper half.
#
# ## When was each word said?
#
# The strongest frame in the row that predicts a word, for both halves of the layers.

# %%
frames = list(m.grid.positions)
halves = {"lower": m.scores[:3, :, frames].mean(0), "upper": m.scores[3:, :, frames].mean(0)}
print("word      said        lower half  upper half")
hits = dict.fromkeys(halves, 0)
for word, (start, end) in recording.words.items():
    row = m.tokens.index(f" {word}") - 1
    times = {name: (int(scores[row].argmax()) + 0.5) * 0.02 for name, scores in halves.items()}
    for name, time in times.items():
        hits[name] += start <= time < end
    print(f"{word:8s} {start:5.2f}–{end:.2f}  {times['lower']:10.2f}  {times['upper']:10.2f}")
print("inside of the word:", hits)

# %% [markdown]
# The upper half finds most words. [The evidence](../evidence/speech.md) has a hundred sentences, several
# voices, noise, and the heads that OpenAI chose by hand.
#
# ## Does the word need that sound?
#
# A map only describes. `verify` silences each stretch, and measures what the word's log probability loses.
# `fill="noise"` puts noise of the same level there instead.

# %%
span = t.by(0.3)["doctor"]
print(span.verify(3))
print()
print(span.verify(3, fill="noise"))

# %% [markdown]
# ## What to keep in mind
#
# - One sentence of a synthetic voice shows how a trace works, and not how good it is.
# - A frame of the encoder's output has also read other frames: it is where the sound arrived, and not all
#   that it contains.
# - Silence and noise are both sounds. A word may gain without a stretch.
#
# ## Exercises
#
# 1. How much of each layer's row is outside of the recording?
# 2. Which stretch does "farmer's" need most, by silence? Try all of them.

# %% [markdown]
# ## Answers
#
# 1. The code prints it, for attention and for value norms. What is in the padding's values is small, so
#    norms have less of it.
# 2. A stretch in which it was said.

# %%
attention = lm.run(model, (sound, text), "attention", part="cross")
row = m.tokens.index(" horses") - 1
for name, each in (("attention", attention), ("value norms", m)):
    shares = each.normalized().scores[:, row]
    print("1.", f"{name:11s}", " ".join(f"{float(1 - layer[frames].sum()):4.0%}" for layer in shares))

losses = t.by(0.4)[" farmer's"].verify(20)
best = max(losses, key=lambda each: each.loss)
print("2.", best.source.text, f"{best.loss:.1f} nats")
