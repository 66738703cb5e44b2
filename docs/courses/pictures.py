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
# # Pictures: which patches does a vision transformer use?
#
# Take this course if you want to see which parts of a picture a vision transformer used. You also learn to
# test such a map: a patch that matters changes the result when it is blurred.
#
# **Level:** you know what a patch and [CLS] are in a vision transformer. **Time:** 30 minutes with the
# exercises. **Papers:** Oquab et al., "DINOv2", 2024; Zeiler & Fergus, "Visualizing and Understanding
# Convolutional Networks", ECCV 2014; Darcet et al., "Vision Transformers Need Registers", ICLR 2024.
#
# A vision transformer cuts a picture into patches, which are its tokens. So every map of this library also
# works for pictures, and its rows can be drawn over the picture. In this course you will
#
# 1. draw what [CLS] used in each layer,
# 2. compare attention with Value Zeroing, region by region of the picture,
# 3. test the maps: blur one patch at a time, and measure how much the representation changes,
# 4. look for patches without content that get much attention.

# %% [markdown]
# ## The model and the picture
#
# The model is DINOv2-small, which was trained on pictures without labels. TransformerLens has no DINOv2, so
# its LayerScale is folded into the weights (`lm.models.fold_layer_scale`), and a ViT with the same outputs is
# loaded. The picture is drawn here, so we know where everything is.

# %%
import numpy as np
import torch
from scipy.stats import spearmanr

import lens_mix as lm
from demos import models, pictures

size = 140
model = models.dinov2(size)
picture = pictures.draw_picture(size)
pixels = pictures.as_pixels(picture)
print("pixels", list(pixels.shape))

# %% [markdown]
# ## What did [CLS] use?
#
# The prompt of `lm.run` is the tensor of pixels. The map has a grid, which knows the place of every patch.
# `show` draws the row of [CLS] over the picture, layer by layer. Each layer has its own scale.

# %%
maps = lm.run(model, pixels, ["attention", "value_norm", "value_zeroing"], queries=[0])
grid = maps["attention"].grid
print(f"{grid.rows} x {grid.columns} patches of {grid.patch[0]} pixels")
maps["attention"].show(picture=True)

# %% [markdown]
# In layers 1 to 5, most of the row is [CLS] itself. Layer 0 reads one patch, layer 1 the meadow. From the
# middle on, the house, the ball and the sun are darker than the sky and the meadow.

# %%
maps["value_zeroing"].show(picture=True)

# %% [markdown]
# ## Region by region
#
# How much of a row is on each region of the picture? The last line is the share of the patches that it
# covers, which a row without any preference would have. [CLS] itself is left out.

# %%
parts = np.array(pictures.name_parts(grid))
names = ("sky", "meadow", "house", "ball", "sun")
print(f"{'last three layers':18s}", *(f"{name:>7s}" for name in names))
for method, m in maps.items():
    rows = grid.lay_out(m.scores[-3:, 0]).flatten(1)
    shares = (rows / rows.sum(1, keepdim=True)).mean(0)
    print(f"{method:18s}", *(f"{shares[torch.tensor(parts == name)].sum():7.0%}" for name in names))
print(f"{'patches':18s}", *(f"{(parts == name).mean():7.0%}" for name in names))

# %% [markdown]
# All maps give the house, the ball and the sun more than their share of the patches. Value Zeroing gives the
# sky and the meadow the least. This does not show that their values are unimportant: 1 − cosine grows with
# the square of a small change, so small shares become smaller still.

# %% [markdown]
# ## A test: blur one patch at a time
#
# A map describes what was moved. Only an intervention shows what the result depends on. There is no
# classifier here, so the target is the representation itself: the cosine of the new [CLS] with that of the
# whole picture. `Occlusion(by="blur")` replaces one patch at a time by a blurred version of the picture,
# before the model reads it.

# %%
target = pictures.likeness(pixels, model)
blur = lm.methods.Occlusion(target=target, by="blur")
maps["occlusion"] = lm.run(model, pixels, blur, queries=[0], progress=None)
maps["occlusion"].show(picture=True)

# %% [markdown]
# Which map orders the patches as the blur does? Input gradients and the last layer's rollout describe the
# whole model, so each has one number.

# %%
measured = grid.lay_out(maps["occlusion"].scores[0, 0]).flatten()


def agreement(row: torch.Tensor) -> float:
    """Return the rank correlation of a row with the measured changes, over the patches."""
    return float(spearmanr(grid.lay_out(row).flatten(), measured)[0])


for method in ("attention", "value_norm", "value_zeroing"):
    by_layer = [agreement(row) for row in maps[method].scores[:, 0]]
    print(f"{method:18s}", " ".join(f"{value:5.2f}" for value in by_layer))
gradients = lm.run(model, pixels, lm.methods.InputGradients(target=target), queries=[0])
print(f"{'input gradients':18s} {agreement(gradients.scores[0, 0]):5.2f}")
rollout = lm.rollout(lm.run(model, pixels, "attention"))
print(f"{'rollout':18s} {agreement(rollout.scores[-1, 0]):5.2f}")

# %% [markdown]
# ## Do flat patches attract attention?
#
# Large vision transformers keep information of the whole picture in a few patches without content, which then
# get much attention (Darcet et al., "Vision Transformers Need Registers", ICLR 2024). Does this model? The
# next pictures have four shapes on a flat ground. The first number is the share of flat patches in the row of
# [CLS], divided by their share of the picture, as a mean over the pictures. The second is the share of the
# pictures in which the patch with the highest score is flat.

# %%
ratios: dict[str, list[torch.Tensor]] = {}
for seed in range(8):
    shapes = pictures.draw_shapes(seed, size)
    flat = torch.tensor(pictures.is_flat(shapes, grid))
    found = lm.run(model, pictures.as_pixels(shapes), list(maps)[:3], queries=[0])
    for method, m in found.items():
        rows = grid.lay_out(m.scores[:, 0]).flatten(1)
        rows = rows / rows.mean(1, keepdim=True)
        ratios.setdefault(method, []).append(
            torch.stack([rows[:, flat].mean(1), flat[rows.argmax(1)].float()])
        )
for method, values in ratios.items():
    shares, strongest = torch.stack(values).mean(0)
    print(f"{method:18s} flat patches ", " ".join(f"{value:5.2f}" for value in shares))
    print(f"{'':18s} strongest one", " ".join(f"{value:5.2f}" for value in strongest))

# %% [markdown]
# Flat patches cover about two thirds of these pictures. In layer 1 they get more than that share, from
# attention and from both maps of values. In later layers they get less, and the strongest patch is mostly on
# a shape. In the last layer it is flat in more pictures for attention than for the values, but eight pictures
# are too few to tell the two apart. No large model was tested.

# %% [markdown]
# ## A page
#
# `lm.page` makes one file of all maps, with the picture. Save it, and click a patch in the browser to see
# what that patch used.

# %%
page = lm.page(lm.run(model, pixels, ["value_norm", "attention"]), picture=True)
page.save("pictures.html")

# %% [markdown]
# ## What to keep in mind
#
# - One picture with flat colors shows how a comparison works. It does not show which method is better.
# - A picture with a blurred patch is one that the model has never seen. Compare
#   `by="blur"`, `by="mean"` and `by="values"`, which change different things.
# - A patch's position is where it was at the input. In higher layers its representation also contains other
#   patches.
#
# ## Exercises
#
# 1. Which part does the ball use? Take the row of a patch of the ball instead of that of [CLS].
# 2. Does a rollout of `attn_res_ln` agree better with the blur than that of attention?
# 3. Blur the whole house at once, with `spans=`. Is the change the sum of those of its patches?

# %% [markdown]
# ## Answers
#
# 1. Mostly the ball itself, in most layers.
# 2. The code prints both. One picture cannot decide between them.
# 3. No: the whole house changes [CLS] less than the sum. The cosine is not linear, and patches share
#    information.

# %%
ball = [position for position, part in zip(grid.positions, parts, strict=True) if part == "ball"]
row = lm.run(model, pixels, "value_zeroing", queries=[ball[0]])
shares = grid.lay_out(row.scores[:, 0]).flatten(1)
shares = (shares / shares.sum(1, keepdim=True))[:, torch.tensor(parts == "ball")].sum(1)
print("1. share of the ball by layer:", " ".join(f"{share:.0%}" for share in shares))

other = lm.rollout(lm.run(model, pixels, "attn_res_ln"))
rollouts = {"attention": rollout, "attn_res_ln": other}
print("2.", ", ".join(f"{name} {agreement(m.scores[-1, 0]):.2f}" for name, m in rollouts.items()))

house = [position for position, part in zip(grid.positions, parts, strict=True) if part == "house"]
whole = lm.run(
    model, pixels, lm.methods.Occlusion(target=target, by="blur", spans={"house": house}), queries=[0]
)
single = maps["occlusion"].scores[0, 0, house].sum()
print(f"3. the whole house {whole.scores.item():.3f}, the sum of its patches {single:.3f}")
