"""Test prompts of pictures and sound, their grids, removals, figures and errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import transformers

import lens_mix as lm
from lens_mix._inputs.features import any_features, blurred, covered_cells
from lens_mix.maps import Grid
from tests.hugging_face_oracle import Reference, attention_attribution, gradient_attention
from tests.tiny_models import available, bridge, tokens, wrapped_model

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = [
    name for name in ("vit", "deit", "ast", "hubert", "hubert_stable", "wav2vec2") if available(bridge, name)
]
CLASSIFIERS = [name for name in NAMES if name in ("vit", "deit", "ast")]
SOUNDS = [name for name in NAMES if name.startswith(("hubert", "wav"))]
if not NAMES:
    pytest.skip("this TransformerLens has no models of pictures and sound", allow_module_level=True)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def model(name):
    return bridge(name, torch.float64)


@pytest.fixture
def prompt(model):
    return tokens(model, 1)


@pytest.fixture
def reference(name, prompt):
    """Return the same model of transformers, which TransformerLens has not changed."""
    return Reference(wrapped_model(name, torch.float64, attn_implementation="eager"), prompt)


def assert_close(found, expected):
    assert float(expected.abs().max()) > 1e-8
    assert float((found - expected).abs().max()) <= 1e-6 * max(1.0, float(expected.abs().max()))


# ------------------------------------------------------------------ maps against plain transformers


def test_attention_and_its_rollout_are_those_of_transformers(model, prompt, reference):
    weights = reference.attention().mean(dim=1).double()
    assert_close(lm.run(model, prompt, "attention").scores, weights)
    expected = torch.eye(weights.shape[-1], dtype=torch.float64)
    for layer in weights:
        expected = (0.5 * layer + 0.5 * torch.eye(len(layer), dtype=torch.float64)) @ expected
    assert_close(lm.rollout(lm.run(model, prompt, "attention")).scores[-1], expected)


def test_value_zeroing_and_value_norms_are_those_of_transformers(model, prompt, reference):
    assert_close(lm.run(model, prompt, "value_zeroing").scores, reference.value_zeroing())
    assert_close(lm.run(model, prompt, "value_zeroing", engine="hooks").scores, reference.value_zeroing())
    assert_close(lm.run(model, prompt, "value_norm").scores, reference.value_shares().norm(dim=-1))


def test_residual_and_norm_are_those_of_transformers(name, model, prompt, reference):
    """Compare with the vectors of attention and of the residual stream.

    In post-norm models, a norm reads their sum. In pre-norm models, no norm is on the residual stream.
    """
    shares, found = reference.value_shares(), lm.run(model, prompt, "attn_res_ln").scores
    for layer in range(len(shares)):
        stream = reference.input_of(layer)
        vectors = shares[layer] + torch.diag_embed(stream.T).permute(1, 2, 0)
        if name in ("hubert", "wav2vec2"):
            norm = reference.layers[layer].layer_norm
            # The norm divides by the standard deviation of all that it reads, biases included.
            read = stream + reference.attention_output(layer, None)
            deviation = torch.sqrt(read.var(-1, unbiased=False) + norm.eps)[:, None, None]
            vectors = (vectors - vectors.mean(-1, keepdim=True)) / deviation * norm.weight.detach()
        assert_close(found[layer], vectors.norm(dim=-1))


def test_gradients_are_those_of_transformers(name, model, prompt, reference):
    methods = [lm.methods.GradientAttention(), lm.methods.AttentionAttribution(n_steps=5)]
    maps = lm.run(model, prompt, methods)
    for layer in range(len(reference.layers)):
        assert_close(maps["gradient_attention"].scores[layer], gradient_attention(reference, layer))
        expected = attention_attribution(reference, layer, steps=5)
        assert_close(maps["attention_attribution"].scores[layer], expected)


def test_input_gradients_are_with_respect_to_the_embeddings_of_patches(model, prompt, reference):
    leaves = []

    def keep(module, args, kwargs):
        given = args[0] if args else kwargs["hidden_states"]
        leaves.append(given.detach().requires_grad_(True))
        return ((leaves[0], *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": leaves[0]})

    with reference.layers[0].register_forward_pre_hook(keep, with_kwargs=True):
        logits = reference.model(**reference.inputs).logits
    logits = logits[0] if logits.ndim == 2 else logits[0, -1]
    (gradient,) = torch.autograd.grad(logits.max(), leaves)
    query = 0 if reference.model(**reference.inputs).logits.ndim == 2 else -1
    m = lm.run(
        model,
        prompt,
        lm.methods.InputGradients(score="norm", target=lm.targets.predicted(of="logit")),
        queries=[query],
    )
    assert_close(m.scores[0, 0], gradient[0].norm(dim=-1))


# ------------------------------------------------------------------ prompts and grids


def test_all_forms_of_a_prompt_give_the_same_map(name, model, prompt):
    expected = lm.run(model, prompt, "value_zeroing")
    input_name = "pixel_values" if name in ("vit", "deit") else "input_values"
    forms = [
        prompt[0],
        prompt[0].numpy(),
        transformers.BatchFeature({input_name: prompt}),
        {input_name: [prompt[0].numpy()]},
    ]
    for form in forms:
        m = lm.run(model, form, "value_zeroing")
        torch.testing.assert_close(m.scores, expected.scores)
        assert m.tokens == expected.tokens
        assert m.grid == expected.grid
        assert torch.equal(m.features, prompt[0])
    assert expected.key_labels == expected.tokens
    assert not expected.causal


def test_several_prompts_give_the_maps_of_each(name, model, prompt):
    others = tokens(model, 2, seed=5)
    expected = [lm.run(model, one, "value_zeroing").scores for one in others]
    for given in (others, list(others), {("pixel_values" if others.ndim == 4 else "input_values"): others}):
        found = list(lm.run_many(model, given, "value_zeroing"))
        for m, scores in zip(found, expected, strict=True):
            torch.testing.assert_close(m.scores, scores)


@pytest.mark.skipif(not SOUNDS, reason="needs HuBERT")
def test_sounds_of_several_lengths_run_one_by_one_and_padding_is_removed():
    model = bridge("hubert", torch.float64)
    short, long = tokens(model, 1, 5)[0], tokens(model, 1, 9)[0]
    alone = [lm.run(model, one, "attention").scores for one in (short, long)]
    for m, scores in zip(lm.run_many(model, [short, long], "attention"), alone, strict=True):
        torch.testing.assert_close(m.scores, scores)
    padded = torch.cat([short, torch.zeros(40, dtype=torch.float64)])
    mask = torch.cat([torch.ones(len(short)), torch.zeros(40)]).long()
    m = lm.run(model, padded, "attention", attention_mask=mask)
    torch.testing.assert_close(m.scores, alone[0])
    with pytest.raises(ValueError, match="padding on the left or on the right only"):
        lm.run(model, padded, "attention", attention_mask=torch.tensor([1, 0, 1] + [1] * (len(mask) - 3)))


def test_a_patch_is_where_its_pixels_are():
    """A pixel changes the embedding of its own patch alone."""
    model = bridge("vit", torch.float64)
    prompt = tokens(model, 1)
    grid = lm.run(model, prompt, "attention").grid
    embed = model.original_model.vit.embeddings
    for row, column in itertools.product(range(16), repeat=2):
        changed = prompt.clone()
        changed[0, 0, row, column] += 1
        moved = (embed(changed) - embed(prompt)).abs().sum(-1)[0].nonzero()[:, 0].tolist()
        assert len(moved) == 1
        top, left, bottom, right = grid.box(moved[0])
        assert top <= row < bottom
        assert left <= column < right
        assert grid.label(moved[0]) == f"patch {row // 8},{column // 8}"


@pytest.mark.skipif("ast" not in NAMES, reason="needs AST")
def test_a_patch_of_a_spectrogram_is_where_its_numbers_are():
    model = bridge("ast", torch.float64)
    prompt = tokens(model, 1)
    grid = lm.run(model, prompt, "attention").grid
    embed = model.original_model.audio_spectrogram_transformer.embeddings
    for time, band in itertools.product(range(10), range(8)):
        changed = prompt.clone()
        changed[0, time, band] += 1
        moved = (embed(changed) - embed(prompt)).abs().sum(-1)[0].nonzero()[:, 0].tolist()
        boxes = {position: grid.box(position) for position in grid.positions}
        expected = [
            position
            for position, (top, left, bottom, right) in boxes.items()
            if top <= band < bottom and left <= time < right
        ]
        assert moved == expected


@pytest.mark.skipif(not SOUNDS, reason="needs HuBERT")
def test_a_frame_reads_its_own_samples():
    model = bridge("hubert", torch.float64)
    prompt = tokens(model, 1)
    grid = lm.run(model, prompt, "attention").grid
    layers = model.original_model.hubert.feature_extractor.conv_layers

    def embed(samples):
        hidden = samples[:, None]
        for layer in layers:
            hidden = layer.conv(hidden)
        return hidden

    for sample in range(prompt.shape[1]):
        changed = prompt.clone()
        changed[0, sample] += 1
        moved = (embed(changed) - embed(prompt)).abs().sum(1)[0].nonzero()[:, 0].tolist()
        assert moved == [p for p in grid.positions if grid.box(p)[1] <= sample < grid.box(p)[3]]
    assert grid.times[:3] == pytest.approx([0, 10 / 16000, 20 / 16000])
    assert (grid.noun, grid.rows, grid.columns) == ("frame", 1, 7)


def test_labels_say_where_a_position_is():
    seconds = Grid(1, 3, (0, 1, 2), (1, 1200), (1, 400), (1, 320), 1 / 16000)
    assert [seconds.label(position) for position in range(4)] == ["0.00 s", "0.02 s", "0.04 s", None]
    bands = Grid(2, 2, (2, 3, 4, 5), (32, 40), (16, 16), (10, 10), 0.01)
    assert bands.label(5) == "0.10 s, band 1"
    assert bands.place(4) == (1, 0)
    assert bands.lay_out(torch.arange(6.0)).tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": (0, 1, 2)}, "expected 4 different ones"),
        ({"positions": (0, 0, 1, 2)}, "expected 4 different ones"),
        ({"size": (4,)}, "at least two"),
        ({"rows": 0}, "rows"),
    ],
)
def test_a_grid_that_does_not_fit_raises(changes, words):
    fields = {
        "rows": 2,
        "columns": 2,
        "positions": (0, 1, 2, 3),
        "size": (4, 4),
        "patch": (2, 2),
        "step": (2, 2),
    }
    with pytest.raises(ValueError, match=words):
        Grid(**{**fields, **changes})


def test_a_map_keeps_its_grid_where_its_keys_stay(model, prompt, tmp_path):
    m = lm.run(model, prompt, "value_zeroing")
    m.save(tmp_path / "map.safetensors")
    loaded = lm.MixingMap.load(tmp_path / "map.safetensors")
    assert loaded.grid == m.grid
    assert torch.equal(loaded.features, m.features)
    torch.testing.assert_close(lm.run_again(model, loaded).scores, m.scores)
    for same in (lm.rollout(m), m.select_queries([0]), m[0], lm.MixingMap.from_dataframe(m.to_dataframe())):
        assert same.grid == m.grid
    first = m.grid.positions[0]
    moved = m.drop_bos()
    if first == 0:
        assert moved.grid is None
    else:
        assert moved.grid.positions == tuple(position - 1 for position in m.grid.positions)
        assert [moved.key_labels[key] for key in moved.grid.positions] == m.tokens[first:]
    assert m.drop(first).grid is None


# ------------------------------------------------------------------ removals


def test_occlusion_fills_each_patch_before_the_model_reads_it(name, model, prompt, reference):
    """Compare with passes of plain transformers over pictures and sounds that are filled here by loops."""
    query = 0 if name in CLASSIFIERS else 3
    m = lm.run(model, prompt, lm.methods.Occlusion(by="mean"), queries=[query])
    grid = m.grid

    def log_probability(features):
        logits = reference.model(features).logits
        row = logits[0] if logits.ndim == 2 else logits[0, query]
        return row.log_softmax(-1)

    with torch.no_grad():
        clean = log_probability(prompt)
        best = int(clean.argmax())
        for position in range(len(m.tokens)):
            changed = prompt.clone()
            if grid.box(position) is not None:
                top, left, bottom, right = grid.box(position)
                if prompt.ndim == 4:
                    for channel in range(3):
                        changed[0, channel, top:bottom, left:right] = prompt[0, channel].mean()
                elif prompt.ndim == 3:
                    changed[0, left:right, top:bottom] = prompt.mean()
                else:
                    changed[0, left:right] = prompt.mean()
            expected = clean[best] - log_probability(changed)[best]
            assert float(m.scores[0, 0, position]) == pytest.approx(float(expected), abs=1e-9)
    assert float(m.scores.abs().max()) > 1e-4


def test_groups_of_patches_are_filled_at_once(model, prompt):
    query, some = 0, [3, 4]
    by = lm.methods.Occlusion(
        by="mean", spans={"two": some}, target=lm.targets.head(lambda resid: resid[:, 0].sum(-1))
    )
    m = lm.run(model, prompt, by, queries=[query])
    assert m.key_labels == ["two"]
    assert m.grid is None
    assert abs(float(m.scores[0, 0, 0])) > 1e-6


@pytest.mark.parametrize("axes", [(2, 12, 10), (12, 10), (90,)])
def test_a_blur_keeps_what_is_constant_and_smooths_the_rest(axes):
    # A grid is of bands x time, and a spectrogram is [time, band].
    size, patch = {3: ((12, 10), (3, 2)), 2: ((10, 12), (2, 3)), 1: ((1, 90), (1, 5))}[len(axes)]
    grid = Grid(1, 1, (0,), size, patch, patch, None if len(axes) == 3 else 0.01)
    flat = torch.full(axes, 0.7, dtype=torch.float64)
    torch.testing.assert_close(blurred(flat, grid), flat)
    noise = torch.randn(*axes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sigmas = {3: (3, 2), 2: (3, 2), 1: (5,)}[len(axes)]
    expected = noise
    for axis, sigma in zip(range(-len(sigmas), 0), sigmas, strict=True):
        weights = gaussian_weights(noise.shape[axis], sigma)
        expected = torch.tensordot(weights, expected, dims=([1], [axis])).movedim(0, axis)
    torch.testing.assert_close(blurred(noise, grid), expected)


def gaussian_weights(count, sigma):
    """Return the matrix of a blur along one axis; beyond its ends, the outermost number is repeated."""
    weights = torch.zeros(count, count, dtype=torch.float64)
    for place, distance in itertools.product(range(count), range(-3 * sigma, 3 * sigma + 1)):
        weights[place, min(max(place + distance, 0), count - 1)] += float(
            np.exp(-0.5 * (distance / sigma) ** 2)
        )
    return weights / weights.sum(1, keepdim=True)


def test_cells_cover_their_boxes():
    grid = Grid(2, 3, (1, 2, 3, 4, 5, 6), (5, 9), (3, 4), (2, 2), 0.01)
    removed = torch.tensor([[1, 0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()
    expected = torch.zeros(3, 5, 9, dtype=torch.bool)
    for copy, position in removed.nonzero().tolist():
        if grid.box(position) is not None:
            top, left, bottom, right = grid.box(position)
            expected[copy, top:bottom, left:right] = True
    assert torch.equal(covered_cells(grid, removed), expected)


@pytest.mark.parametrize("by", ["mask", "values", "blur"])
def test_other_removals_run(model, prompt, by):
    m = lm.run(model, prompt, lm.methods.Occlusion(by=by), queries=[0])
    assert float(m.scores.abs().max()) > 1e-6


def test_tokens_cannot_be_filled_and_patches_not_replaced(model, prompt):
    with pytest.raises(lm.UnsupportedModelError, match=r"write lm.methods.Occlusion\(by='mean'\)"):
        lm.run(model, prompt, "occlusion", queries=[0])
    assert "by='mean'" in lm.support(model)["occlusion"]
    with pytest.raises(lm.UnsupportedModelError, match="expected a model of pictures or sound"):
        lm.run(
            bridge("bert"),
            torch.arange(4, 9),
            lm.methods.Occlusion(by="mean", target=lm.targets.token(3)),
            queries=[0],
        )


# ------------------------------------------------------------------ targets, support and errors


@pytest.mark.parametrize("name", CLASSIFIERS, indirect=True)
def test_a_class_is_explained_at_the_first_position(model, prompt):
    m = lm.run(model, prompt, lm.methods.InputGradients(target=lm.targets.class_(2)), queries=[0])
    assert "class 2" in m.explanation()
    assert m.default_query == 0
    with pytest.raises(ValueError, match=r"queries=\[0\]"):
        lm.run(model, prompt, "input_gradients")


def test_a_body_needs_a_target_on_its_hidden_states():
    config = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
    )
    model = boot(transformers.ViTModel(config, add_pooling_layer=False))
    pixels = torch.randn(3, 16, 16)
    with pytest.raises(lm.UnsupportedModelError, match=r"no classifier.*lm\.targets\.head"):
        lm.run(model, pixels, "input_gradients", queries=[0])
    target = lm.targets.head(lambda resid: resid[:, 0, 0], after_final_norm=True)
    assert lm.run(model, pixels, lm.methods.InputGradients(target=target), queries=[0]).scores.any()


def boot(hf_model):
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf_model.eval().set_attn_implementation("eager")
    name = type(hf_model).__name__
    return build_bridge_from_module(hf_model, architecture=name, hf_config=hf_model.config).eval()


@pytest.mark.skipif(not SOUNDS, reason="needs HuBERT")
@pytest.mark.parametrize("target", [lm.targets.next_token(), lm.targets.loss(), lm.targets.span(1, 3)])
def test_targets_on_tokens_raise(target):
    model = bridge("hubert")
    with pytest.raises(ValueError, match="got a picture or sound"):
        lm.run(model, tokens(model, 1), lm.methods.InputGradients(target=target), queries=[-2])


def test_the_model_is_verified_on_random_numbers(model):
    assert lm.check(model).ok
    table = lm.support(model)
    assert table["value_zeroing"] == "ok (algebra)"
    assert "causal" in table["context_length"]
    first, again = (any_features(model, torch.device("cpu")) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("a text", TypeError, "reads no tokens"),
        (torch.zeros(3, 16, 16, dtype=torch.long), TypeError, "real numbers"),
        (torch.zeros(3, 8, 8), ValueError, r"expected pixels \[3, 16, 16\]"),
        (torch.zeros(2, 3, 16, 16), ValueError, "use run_many"),
        (torch.full((3, 16, 16), torch.nan), ValueError, "finite"),
        ({"input_ids": torch.zeros(1, 3)}, TypeError, "expected pixel_values"),
    ],
)
def test_other_prompts_raise(given, error, words):
    with pytest.raises(error, match=words):
        lm.run(bridge("vit"), given, "attention")


def test_a_pil_picture_needs_the_processor():
    image = pytest.importorskip("PIL.Image")
    model = bridge("vit")
    picture = image.fromarray(np.full((20, 20, 3), 200, np.uint8))
    with pytest.raises(TypeError, match=r"model\.processor"):
        lm.run(model, picture, "attention")
    model.processor = lambda images, return_tensors: {
        "pixel_values": torch.full((1, 3, 16, 16), images.width / 20)
    }
    assert float(lm.run(model, picture, "attention").features.mean()) == 1


def test_further_inputs_raise(model, prompt):
    with pytest.raises(ValueError, match="expected none besides"):
        lm.run(model, prompt, "attention", token_type_ids=torch.zeros(1))
    with pytest.raises(ValueError, match="prepend_bos"):
        lm.run(model, prompt, "attention", prepend_bos=True)


def test_models_without_an_adapter_raise_with_the_reason():
    config = transformers.Speech2TextConfig(
        d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2
    )
    speech = transformers.Speech2TextForConditionalGeneration(config)
    with pytest.raises(TypeError, match=r"TransformerLens .* has no adapter for Speech2Text"):
        lm.run(speech, torch.zeros(80, 3000), "attention")
    dino = transformers.Dinov2Model(
        transformers.Dinov2Config(hidden_size=24, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(TypeError, match=r"lm\.models\.fold_layer_scale"):
        lm.run(dino, torch.zeros(3, 224, 224), "attention")


# ------------------------------------------------------------------ LayerScale


def tiny_dinov2(**changes):
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, **changes
    )
    torch.manual_seed(0)
    model = transformers.Dinov2Model(config).eval()
    for name, parameter in model.named_parameters():
        if "lambda" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 0.5, 0.4)
    return model


@pytest.mark.parametrize("size", [32, 16, 24])
def test_layer_scale_becomes_part_of_the_weights(size):
    model = tiny_dinov2().double()
    vit = lm.models.fold_layer_scale(model, image_size=size)
    pixels = torch.randn(1, 3, size, size, dtype=torch.float64)
    with torch.no_grad():
        own = model(pixels, output_hidden_states=True)
        folded = vit(pixels, output_hidden_states=True)
    for expected, found in zip(own.hidden_states, folded.hidden_states, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(folded.last_hidden_state, own.last_hidden_state, atol=1e-12, rtol=1e-12)


def test_value_zeroing_of_a_folded_model_is_that_of_the_original():
    model = tiny_dinov2().double()
    model.set_attn_implementation("eager")
    pixels = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    expected = Reference(model, pixels)
    m = lm.run(boot(lm.models.fold_layer_scale(model)), pixels, "value_zeroing")
    assert_close(m.scores, expected.value_zeroing())
    assert_close(
        lm.run(boot(lm.models.fold_layer_scale(model)), pixels, "attention").scores,
        expected.attention().mean(1).double(),
    )


def test_what_is_no_vit_with_layer_scale_raises():
    with pytest.raises(TypeError, match="expected a DINOv2"):
        lm.models.fold_layer_scale(wrapped_model("vit"))
    with pytest.raises(ValueError, match="use_swiglu_ffn"):
        lm.models.fold_layer_scale(tiny_dinov2(use_swiglu_ffn=True))
    settings = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    registers = transformers.Dinov2WithRegistersForImageClassification(
        transformers.Dinov2WithRegistersConfig(**settings)
    )
    reason = "expected a DINOv2 without registers, because the ViT that TransformerLens knows has no tokens"
    with pytest.raises(ValueError, match=f"{reason}.*got Dinov2WithRegistersForImageClassification"):
        lm.models.fold_layer_scale(registers)
    with pytest.raises(TypeError, match=reason):
        lm.run(registers, torch.zeros(3, 28, 28), "attention")
    with pytest.raises(lm.UnsupportedModelError, match=reason):
        lm.wrap(registers)
    changed = tiny_dinov2()
    changed.encoder.layer[1].register_forward_hook(lambda module, args, output: output * 1.01)
    with pytest.raises(ValueError, match="another output of block 1"):
        lm.models.fold_layer_scale(changed)


def test_folding_changes_neither_the_model_nor_random_numbers():
    model = tiny_dinov2().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    lm.models.fold_layer_scale(model)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
