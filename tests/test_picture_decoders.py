"""Test decoders that read pictures beside tokens: maps of the joint sequence against transformers alone."""

from __future__ import annotations

import functools

import pytest
import torch

import lens_mix as lm
from lens_mix._classes.model_classes import transformer_lens_version
from lens_mix.experiments.passes import run_prompt
from lens_mix.maps import Grid
from lens_mix.methods import METHODS
from lens_mix.traces.attribution import read_written
from tests.hugging_face_oracle import Reference, attention_attribution, gradient_attention
from tests.matrix import pictured_cases
from tests.norm_oracle import norms, oracle
from tests.pictured_models import GRIDS, IMAGE_TOKEN, picture_prompt
from tests.tiny_models import toy_tokenizer, wrapped_model

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = [case.label.removeprefix("bridge ") for case in pictured_cases() if case.picture_refusal is None]
if not NAMES:
    pytest.skip("no TransformerBridge in this TransformerLens", allow_module_level=True)
# `make test` has each way to find places, and each kind of positions and masks.
USUAL = ("gemma3_pictures", "llava", "idefics3", "qwen2_5_vl")
EVERY = [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in NAMES]
# These add features of patches above the first block.
DEEP = ("qwen3_vl",)
IS_OLD = transformer_lens_version()[0] < 4
# TransformerLens 3 runs the vision encoder of LLaVA with an error of 1e-5 on these models.
TOLERANCE = 1e-3 if IS_OLD else 1e-6
METHODS_HERE = ["attention", "value_zeroing", "value_norm", "attn_res", "attn_res_ln", "gradient_attention"]


@functools.cache
def model_of(name):
    return next(case for case in pictured_cases() if case.label == f"bridge {name}").build(torch.float64)


def with_tokenizer(name):
    case = next(case for case in pictured_cases() if case.label == f"bridge {name}")
    model = case.build(torch.float64)
    model.tokenizer = toy_tokenizer()
    return model


@functools.cache
def reference(name):
    untouched = wrapped_model(name, torch.float64, attn_implementation="eager")
    untouched.set_attn_implementation("eager")
    return Reference(untouched, picture_prompt(name))


@functools.cache
def maps_of(name):
    return lm.run(model_of(name), picture_prompt(name), METHODS_HERE)


def close(found, expected):
    assert float(expected.abs().max()) > 1e-8
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def image_positions(name, pictures=1):
    tokens = picture_prompt(name, pictures)["input_ids"][0]
    return (tokens == IMAGE_TOKEN).nonzero()[:, 0].tolist()


# ------------------------------------------------------------------ against transformers


@pytest.mark.parametrize("name", EVERY)
def test_weights_agree_with_hugging_face(name):
    close(maps_of(name)["attention"].scores, reference(name).attention().mean(dim=1))


@pytest.mark.parametrize("engine", ["auto", "hooks"])
@pytest.mark.parametrize("name", EVERY)
def test_value_zeroing_agrees_with_hugging_face(name, engine):
    found = lm.run(model_of(name), picture_prompt(name), "value_zeroing", engine=engine)
    close(found.scores, reference(name).value_zeroing())


@pytest.mark.parametrize("name", EVERY)
def test_value_norms_agree_with_hugging_face(name):
    close(maps_of(name)["value_norm"].scores, reference(name).value_shares().norm(dim=-1))


@pytest.mark.parametrize("name", EVERY)
def test_norms_with_residual_agree_with_vectors_that_hugging_face_confirms(name):
    blocks = run_prompt(model_of(name), picture_prompt(name), lm.methods.AttnRes()).blocks
    shares = reference(name).value_shares()
    for layer, block in enumerate(blocks):
        written = oracle(block, feed_forward=False)
        close(written.attention[:, :-1], shares[layer])
        close(block.resid_pre[0], reference(name).input_of(layer))
        close(maps_of(name)["attn_res"].scores[layer], norms(written.residual))
        close(maps_of(name)["attn_res_ln"].scores[layer], norms(written.normed))


@pytest.mark.parametrize("name", EVERY)
def test_rollout_is_the_product_of_hugging_faces_weights(name):
    weights = reference(name).attention().mean(dim=1)
    mixed = [0.5 * each + 0.5 * torch.eye(len(each), dtype=each.dtype) for each in weights]
    found = lm.rollout(maps_of(name)["attention"], receptive_field=False)
    close(found.scores[-1], mixed[1] @ mixed[0])


@pytest.mark.parametrize("name", EVERY)
def test_gradients_of_weights_agree_with_hugging_face(name):
    attributed = lm.run(model_of(name), picture_prompt(name), lm.methods.AttentionAttribution(n_steps=5))
    for layer in range(2):
        close(maps_of(name)["gradient_attention"].scores[layer], gradient_attention(reference(name), layer))
        close(attributed.scores[layer], attention_attribution(reference(name), layer, steps=5))


def input_gradients(own):
    """Return ‖∂ logit / ∂ x_j‖ of the largest logit at the last position, where x enters the first layer."""
    leaves = []

    def enter(module, args, kwargs):
        given = args[0] if args else kwargs.pop("hidden_states")
        leaves.append(given.detach().requires_grad_(True))
        return (leaves[0], *args[1:]), kwargs

    with torch.enable_grad(), own.layers[0].register_forward_pre_hook(enter, with_kwargs=True):
        logits = own.model(**own.inputs, use_cache=False).logits[0, -1]
    return torch.autograd.grad(logits.max(), leaves)[0][0].norm(dim=-1)


@pytest.mark.parametrize("name", [each for each in EVERY if each.values[0] not in DEEP])
def test_input_gradients_agree_with_hugging_face(name):
    found = lm.run(model_of(name), picture_prompt(name), "input_gradients", queries=[-1])
    close(found.scores[0, 0], input_gradients(reference(name)))


# These run copies at repeated positions, or cut the prompt.
ON_TEXT_ALONE = {"token_patching", "context_length"}


@pytest.mark.parametrize("name", EVERY)
def test_the_methods_that_run_on_text_run_on_pictures_or_say_why_not(name):
    on_text = {method for method, engine, _ in lm.support(model_of(name)) if engine}
    ran = set()
    for method in METHODS:
        try:
            m = lm.run(model_of(name), picture_prompt(name), method, queries=[-1])
        except (lm.UnsupportedModelError, ValueError) as refusal:
            assert len(str(refusal)) > 20
            continue
        assert bool(torch.isfinite(m.scores).all())
        assert float(m.scores.abs().max()) > 1e-8
        ran.add(method)
    above_blocks = {method for method in METHODS if METHODS[method]().is_input_map}
    assert ran == on_text - ON_TEXT_ALONE - (above_blocks if name in DEEP else set())


# ------------------------------------------------------------------ places


@pytest.mark.parametrize("pictures", [1, 2])
@pytest.mark.parametrize("name", EVERY)
def test_patches_are_labeled_by_their_place(name, pictures):
    m = lm.run(model_of(name), picture_prompt(name, pictures), "attention", layers=[0])
    labels = [m.tokens[position] for position in image_positions(name, pictures)]
    if GRIDS[name] is None:
        per_picture = len(labels) // pictures
        assert labels == [f"picture {1 + i // per_picture}, {i % per_picture}" for i in range(len(labels))]
        assert any("rows and columns" in note for note in m.notes)
        return
    rows, columns = GRIDS[name]
    places = [(n, r, c) for n in range(1, pictures + 1) for r in range(rows) for c in range(columns)]
    assert labels == [f"picture {n}, {r},{c}" for n, r, c in places]
    assert not any("rows and columns" in note for note in m.notes)
    grids = [Grid(**each["grid"]) for each in m.provenance["pictures"]]
    assert [(grid.rows, grid.columns) for grid in grids] == [GRIDS[name]] * pictures
    assert [position for grid in grids for position in grid.positions] == image_positions(name, pictures)
    assert m.grid == (grids[0] if pictures == 1 else None)
    assert grids[0].size == (16, 16)


@pytest.mark.parametrize("name", [each for each in EVERY if GRIDS[each.values[0]] is not None])
def test_the_place_of_a_patch_is_where_its_pixels_are(name):
    """Change the pixels of one cell of the grid, with a vision encoder that mixes no patches."""
    model = wrapped_model(name, torch.float64)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_output = any(each in path for each in ("out_proj", "attn.proj", "attention.o_proj"))
            if is_output and "language_model" not in path and "text_model" not in path.split("vision")[0]:
                parameter.zero_()
    own = Reference(model, picture_prompt(name))
    clean = own.input_of(0)
    rows, columns = GRIDS[name]
    for row in range(rows):
        for column in range(columns):
            own.inputs = {**picture_prompt(name), "pixel_values": changed_cell(name, row, column)}
            difference = (own.input_of(0) - clean).norm(dim=-1)
            place = image_positions(name)[row * columns + column]
            assert int(difference.argmax()) == place
            assert float(difference.sum() - difference[place]) < 1e-9


def changed_cell(name, row, column):
    """Return the pixels of the prompt with other ones in one cell of the grid."""
    pixels = picture_prompt(name)["pixel_values"].clone()
    rows, columns = GRIDS[name]
    if pixels.ndim == 2:
        # The processor of Qwen-VL puts the patches of one group next to each other.
        group = row * columns + column
        pixels[4 * group : 4 * group + 4] += 1
        return pixels
    height, width = pixels.shape[-2] // rows, pixels.shape[-1] // columns
    pixels[..., row * height : (row + 1) * height, column * width : (column + 1) * width] += 1
    return pixels


@pytest.mark.parametrize("name", EVERY)
def test_a_map_contains_the_pixels_of_its_only_picture(name, tmp_path):
    """Compare the change of the pixels with the cell of the grid in which the picture changed."""
    prompt = picture_prompt(name)
    m = lm.run(model_of(name), prompt, "attention", layers=[0])
    assert lm.run(model_of(name), picture_prompt(name, 2), "attention", layers=[0]).features is None
    if GRIDS[name] is None:
        assert m.features is None
        return
    assert m.features.shape == (3, *m.grid.size)
    assert not torch.equal(m.features, torch.zeros_like(m.features))
    for row, column in ((0, 0), (0, 1), (1, 0)):
        changed = {**prompt, "pixel_values": changed_cell(name, row, column)}
        moved = lm.run(model_of(name), changed, "attention", layers=[0]).features - m.features
        top, left, bottom, right = m.grid.box(m.grid.positions[row * m.grid.columns + column])
        expected = torch.zeros_like(moved)
        expected[:, top:bottom, left:right] = 1
        torch.testing.assert_close(moved, expected)
    # A figure needs no picture, and one whose place is not known is not used.
    figures = pytest.importorskip("lens_mix.view.images")
    given = figures.read_image(m, torch.zeros(3, 30, 20))
    assert (given.pixels == figures.read_image(m, True).pixels).all()
    m.save(tmp_path / "map.safetensors")
    loaded = lm.MixingMap.load(tmp_path / "map.safetensors")
    assert torch.equal(loaded.features, m.features)
    pixels = {key: value for key, value in prompt.items() if key in m.provenance["picture_inputs"]}
    torch.testing.assert_close(lm.run_again(model_of(name), loaded, **pixels).scores, m.scores)


# ------------------------------------------------------------------ which keys a query sees


@pytest.mark.parametrize("queries", [None, [-1], [0, 1]])
def test_a_map_of_gemma_3_is_not_causal_if_patches_see_later_ones(queries):
    name = "gemma3_pictures"
    if name not in NAMES:
        pytest.skip("no such model")
    m = lm.run(model_of(name), picture_prompt(name), "attention", queries=queries)
    assert not m.causal
    assert m.predicts_next
    text = lm.run(model_of(name), torch.tensor([[5, 6, 7, 8]]), "attention", queries=queries)
    assert text.causal


def test_the_receptive_field_of_gemma_3_follows_the_true_mask():
    name = "gemma3_pictures"
    if name not in NAMES:
        pytest.skip("no such model")
    m = maps_of(name)["attention"]
    first, *_, last = image_positions(name)
    assert bool(m.visible()[0, first, last])
    assert float(m.scores[0, first, last]) > 0
    uniform = m.replace(scores=m.visible() / m.visible().sum(-1, keepdim=True, dtype=torch.float64))
    found = lm.rollout(uniform, residual=0, receptive_field=True).scores[-1]
    reached = (m.visible()[1].double() @ m.visible()[0].double()) > 0
    close(found, reached / reached.sum(-1, keepdim=True, dtype=torch.float64))


def test_without_token_types_gemma_3_is_causal_and_says_so():
    name = "gemma3_pictures"
    if name not in NAMES:
        pytest.skip("no such model")
    prompt = picture_prompt(name)
    del prompt["token_type_ids"]
    m = lm.run(model_of(name), prompt, "attention")
    assert m.causal
    assert any("token_type_ids: not given" in note for note in m.notes)


@pytest.mark.parametrize("name", EVERY)
def test_other_decoders_stay_causal(name):
    assert maps_of(name)["attention"].causal == (name != "gemma3_pictures")


# ------------------------------------------------------------------ how pictures are given


@pytest.mark.parametrize("name", EVERY)
def test_an_encoding_is_the_same_as_inputs_by_name(name):
    from transformers import BatchFeature

    prompt = picture_prompt(name)
    encoding = BatchFeature({**prompt, "attention_mask": torch.ones_like(prompt["input_ids"])})
    tokens = prompt.pop("input_ids")
    by_name = lm.run(model_of(name), tokens, "value_zeroing", **prompt)
    many = list(lm.run_many(model_of(name), [encoding, encoding], "value_zeroing"))
    for m in (by_name, *many):
        torch.testing.assert_close(m.scores, maps_of(name)["value_zeroing"].scores, atol=1e-10, rtol=0)
        assert m.tokens == by_name.tokens


@pytest.mark.parametrize("name", EVERY)
def test_the_model_is_as_before(name):
    model = model_of(name)
    prompt = picture_prompt(name)
    tokens = prompt.pop("input_ids")
    before = [getattr(module, "rope_deltas", None) for module in model.original_model.modules()]
    clean = model(tokens, **prompt)
    kept = [getattr(module, "rope_deltas", None) for module in model.original_model.modules()]
    lm.run(model, torch.tensor([[5, 6, 7, 8, 9]]), "attention")
    lm.run(model, {**picture_prompt(name, 2)}, "attention")
    after = [getattr(module, "rope_deltas", None) for module in model.original_model.modules()]
    assert all(one is another for one, another in zip(kept, after, strict=True))
    assert len(before) == len(after)
    torch.testing.assert_close(model(tokens, **prompt), clean, atol=0, rtol=0)


REFUSED = [case for case in pictured_cases() if case.picture_refusal is not None]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.label)
def test_a_model_that_reads_pictures_wrongly_raises_an_error(case):
    model, prompt = case.build(torch.float64), picture_prompt(case.label.removeprefix("bridge "))
    with pytest.raises(lm.UnsupportedModelError, match=case.picture_refusal):
        lm.run(model, prompt, "attention")
    assert lm.run(model, torch.tensor([[5, 6, 7, 8]]), "attention").causal


def test_image_tokens_without_pixels_are_noted():
    name = NAMES[0]
    tokens = picture_prompt(name)["input_ids"]
    m = lm.run(model_of(name), tokens, "attention")
    assert any("pixel_values: not given" in note for note in m.notes)


def test_pictures_that_cannot_be_read_raise_errors():
    model = model_of("llava")
    prompt = picture_prompt("llava")
    with pytest.raises(ValueError, match="expected the image token 42"):
        lm.run(model, torch.tensor([[5, 6, 7]]), "attention", pixel_values=prompt["pixel_values"])
    with pytest.raises(ValueError, match="expected the pixels"):
        lm.run(model, prompt["input_ids"], "attention", image_sizes=torch.tensor([[16, 16]]))
    with pytest.raises(TypeError, match="expected real numbers"):
        lm.run(model, prompt["input_ids"], "attention", pixel_values=prompt["pixel_values"].long())
    for number in (torch.nan, torch.inf):
        broken = torch.full_like(prompt["pixel_values"], number)
        with pytest.raises(ValueError, match="pixel_values: expected finite numbers"):
            lm.run(model, prompt["input_ids"], "attention", pixel_values=broken)
    with pytest.raises(ValueError, match="do not match"):
        lm.run(model, prompt["input_ids"][:, :-8], "attention", pixel_values=prompt["pixel_values"])


# ------------------------------------------------------------------ removals


@pytest.mark.parametrize("name", [each for each in EVERY if each.values[0] not in DEEP])
def test_occlusion_replaces_a_patch_by_the_embedding_of_a_token(name):
    model, own = model_of(name), reference(name)
    prompt = picture_prompt(name)
    occlusion = lm.methods.Occlusion(replacements=[11, 12])
    found = lm.run(model, prompt, occlusion, queries=[-1]).scores[0, 0]
    with torch.no_grad():
        clean = own.model(**prompt).logits[0, -1].log_softmax(-1)
    target = int(clean.argmax())
    for position in (1, image_positions(name)[1]):
        lost = 0.0
        for token in (11, 12):
            changed = last_logits(own, position, token).log_softmax(-1)[target]
            lost += float(clean[target] - changed) / 2
        assert abs(float(found[position]) - lost) < TOLERANCE


def last_logits(own, position, token):
    embedded = own.model.get_input_embeddings()(torch.tensor(token))

    def enter(module, args, kwargs):
        given = (args[0] if args else kwargs.pop("hidden_states")).clone()
        given[0, position] = embedded
        return (given, *args[1:]), kwargs

    with torch.no_grad(), own.layers[0].register_forward_pre_hook(enter, with_kwargs=True):
        return own.model(**own.inputs, use_cache=False).logits[0, -1]


@pytest.mark.parametrize("by", ["mask", "values"])
@pytest.mark.parametrize("name", [name for name in USUAL if name in NAMES])
def test_patches_can_be_hidden_and_their_values_zeroed(name, by):
    m = lm.run(model_of(name), picture_prompt(name), lm.methods.Occlusion(by=by), queries=[-1])
    assert float(m.scores[0, 0, image_positions(name)].abs().max()) > 1e-6


@pytest.mark.parametrize("name", [name for name in USUAL if name in NAMES])
def test_input_maps_run_on_the_joint_sequence(name):
    m = lm.input_map(model_of(name), picture_prompt(name))
    assert m.method == "gim"
    assert m.scores.shape == (1, 1, len(m.tokens))


@pytest.mark.parametrize("name", [name for name in DEEP if name in NAMES])
def test_input_maps_are_refused_if_patches_enter_above_the_first_block(name):
    with pytest.raises(
        lm.UnsupportedModelError, match=r"also adds features of their patches before blocks\.1"
    ):
        lm.run(model_of(name), picture_prompt(name), "input_gradients", queries=[-1])
    assert any("adds features of patches" in note for note in maps_of(name)["attention"].notes)
    assert lm.run(model_of(name), torch.tensor([[5, 6, 7]]), "input_gradients").scores.shape == (1, 3, 3)


def test_a_saved_map_needs_its_pixels_to_be_run_again():
    prompt = picture_prompt("llava")
    m = maps_of("llava")["attention"]
    with pytest.raises(ValueError, match="pixel_values="):
        lm.run_again(model_of("llava"), m)
    again = lm.run_again(model_of("llava"), m, pixel_values=prompt["pixel_values"])
    torch.testing.assert_close(again.scores, m.scores, atol=0, rtol=0)


# ------------------------------------------------------------------ traces


@pytest.mark.parametrize("name", [name for name in USUAL if name in NAMES])
def test_each_picture_is_a_source_of_a_trace(name, tmp_path):
    model, prompt = with_tokenizer(name), picture_prompt(name, 2)
    t = lm.trace(model, prompt, answer=" w11 w12")
    positions = image_positions(name, 2)
    half = len(positions) // 2
    pictures = [source for source in t.sources() if source.kind == "picture"]
    assert [source.text for source in pictures] == ["picture 1", "picture 2"]
    assert [list(source.positions) for source in pictures] == [positions[:half], positions[half:]]
    t.save(tmp_path / "trace.safetensors")
    loaded = lm.Trace.load(tmp_path / "trace.safetensors", model)
    torch.testing.assert_close(loaded[0].scores, t[0].scores)


@pytest.mark.parametrize("name", [name for name in USUAL if name in NAMES])
def test_a_source_is_measured_by_deleting_its_whole_picture(name):
    model, whole = with_tokenizer(name), picture_prompt(name, 2)
    t = lm.trace(model, whole, answer=[11, 12])
    first = next(source for source in t.sources() if source.name == "picture 1")
    without = read_written(model, t.reading, t.reading.without(first.positions)).log_probabilities
    own = reference(name).model
    keeps = torch.ones(whole["input_ids"].shape[1] + 2, dtype=torch.bool)
    keeps[list(first.positions)] = False
    found = {}
    for label, rest in (
        ("all", with_answer(whole)),
        ("rest", without_first(name, with_answer(whole), keeps)),
    ):
        with torch.no_grad():
            logits = own(**rest, use_cache=False).logits[0].log_softmax(-1)
        found[label] = float(logits[-3, 11] + logits[-2, 12])
    assert abs(t[:].log_probability - found["all"]) < TOLERANCE
    assert abs(float(without.sum()) - found["rest"]) < TOLERANCE


def test_the_text_between_pictures_cannot_be_deleted_if_they_would_be_read_as_one():
    name = "gemma3_pictures"
    if name not in NAMES:
        pytest.skip("no such model")
    t = lm.trace(with_tokenizer(name), picture_prompt(name, 2), answer=[11, 12])
    between = next(source for source in t.sources() if source.text == "w41 w40")
    with pytest.raises(lm.UnsupportedModelError, match="pictures 1 and 2 would be neighbors"):
        t.reading.without(between.positions)


def with_answer(prompt):
    inputs = dict(prompt)
    inputs["input_ids"] = torch.cat([prompt["input_ids"], torch.tensor([[11, 12]])], dim=1)
    for key in ("token_type_ids", "mm_token_type_ids"):
        if key in inputs:
            inputs[key] = torch.cat([inputs[key], inputs[key].new_zeros(1, 2)], dim=1)
    return inputs


def without_first(name, inputs, keeps):
    """Return the inputs of a prompt without the patches of the first of two pictures."""
    rest = {
        key: value[:, keeps] if value.shape[:2] == (1, len(keeps)) else value for key, value in inputs.items()
    }
    if "image_grid_thw" in rest:
        return {
            **rest,
            "pixel_values": rest["pixel_values"][16:],
            "image_grid_thw": rest["image_grid_thw"][1:],
        }
    pixels = rest["pixel_values"]
    return {**rest, "pixel_values": pixels[:, 1:] if name == "idefics3" else pixels[1:]}


def test_a_part_of_a_picture_cannot_be_deleted():
    t = lm.trace(with_tokenizer("llava"), picture_prompt("llava"), answer=[11, 12], sources="token")
    positions = image_positions("llava")
    patches = [each for each in t.verify(len(t.tokens)) if each.source.positions[0] in positions]
    assert len(patches) == len(positions) > 1
    assert all(each.loss is None for each in patches)
    assert all("delete all patches of picture 1 or none" in each.reason for each in patches)


@pytest.mark.parametrize("name", [name for name in ("gemma3_pictures", "llava", "idefics3") if name in NAMES])
def test_what_a_model_writes_about_a_picture_is_traced(name):
    if IS_OLD:
        pytest.skip("generate takes no inputs of pictures before TransformerLens 4")
    model, prompt = with_tokenizer(name), picture_prompt(name)
    t = lm.trace(model, prompt, generate=3)
    tokens = prompt["input_ids"]
    for each in t.reading.ids[t.n_prompt :]:
        inputs = {**prompt, "input_ids": tokens}
        if "token_type_ids" in prompt:
            types = prompt["token_type_ids"]
            inputs["token_type_ids"] = torch.nn.functional.pad(types, (0, tokens.shape[1] - types.shape[1]))
        with torch.no_grad():
            assert int(reference(name).model(**inputs).logits[0, -1].argmax()) == int(each)
        tokens = torch.cat([tokens, each[None, None]], dim=1)
