"""Test the places of patches, and prompts without some of their pictures."""

from __future__ import annotations

import types

import pytest
import torch

import lens_mix as lm
from lens_mix._inputs.batches import Prompt
from lens_mix._inputs.picture_inputs import check_neighbors, drop_pictures, find_pictures, join_inputs
from lens_mix._inputs.pictures import Picture
from lens_mix.maps import Grid


def fake(**config):
    wrapped = types.SimpleNamespace(config=types.SimpleNamespace(image_token_id=9, **config))
    return types.SimpleNamespace(original_model=wrapped)


def vision(**config):
    return types.SimpleNamespace(**config)


def test_neighboring_pictures_are_divided_by_their_numbers_of_patches():
    model = fake(model_type="llava", vision_config=vision(patch_size=4))
    tokens = torch.tensor([1, *[9] * 12, 2])
    pictures, notes = find_pictures(model, tokens, {"pixel_values": torch.ones(2, 3, 8, 12)})
    assert [picture.positions for picture in pictures] == [tuple(range(1, 7)), tuple(range(7, 13))]
    assert pictures[1].labels[:4] == ["picture 2, 0,0", "picture 2, 0,1", "picture 2, 0,2", "picture 2, 1,0"]
    assert pictures[0].grid == Grid(2, 3, tuple(range(1, 7)), (8, 12), (4, 4), (4, 4))
    assert notes == ()


def test_pictures_of_several_sizes_have_grids_of_their_own():
    model = fake(model_type="qwen2_5_vl", vision_config=vision(patch_size=14, spatial_merge_size=2))
    grids = torch.tensor([[1, 4, 8], [1, 4, 4]])
    tokens = torch.tensor([*[9] * 8, 1, *[9] * 4])
    inputs = {"pixel_values": torch.ones(48, 8), "image_grid_thw": grids}
    pictures, _ = find_pictures(model, tokens, inputs)
    assert [(picture.grid.rows, picture.grid.columns) for picture in pictures] == [(2, 4), (2, 2)]
    assert pictures[0].grid.size == (56, 112)
    assert pictures[0].grid.box(5) == (28, 28, 56, 56)


def test_pictures_that_are_padding_are_not_counted():
    model = fake(model_type="idefics3", vision_config=vision(patch_size=4), scale_factor=2)
    pixels = torch.ones(1, 3, 3, 16, 16)
    pixels[0, 2] = 0
    pictures, notes = find_pictures(model, torch.tensor([9] * 8), {"pixel_values": pixels})
    assert len(pictures) == 2
    assert notes == ()


@pytest.mark.parametrize("model_type", ["llava", "unknown"])
def test_other_numbers_of_patches_have_no_places_and_a_note(model_type):
    model = fake(model_type=model_type, vision_config=vision(patch_size=4))
    tokens = torch.tensor([9, 9, 9, 1, 9])
    pictures, (note,) = find_pictures(model, tokens, {"pixel_values": torch.ones(1, 3, 8, 12)})
    assert [picture.labels for picture in pictures] == [
        ["picture 1, 0", "picture 1, 1", "picture 1, 2"],
        ["picture 2, 0"],
    ]
    assert "numbered within each run" in note


def prompt(pictures=2):
    found = tuple(Picture(number + 1, (3 * number, 3 * number + 1)) for number in range(pictures))
    tokens = torch.tensor([9, 9, 1] * pictures)
    pixels = torch.arange(float(pictures))[:, None, None, None].expand(-1, 3, 4, 4)
    return Prompt(tokens, pictures=found, picture_inputs={"pixel_values": pixels})


def test_a_prompt_without_a_picture_has_the_inputs_of_the_others():
    keeps = torch.tensor([False, False, True, True, True, True])
    rest = prompt().keep(keeps)
    assert [picture.positions for picture in rest.pictures] == [(1, 2)]
    assert rest.pictures[0].name == "picture 2"
    assert rest.picture_inputs["pixel_values"].unique().tolist() == [1]
    assert rest.label(["a"] * 4) == ["a", "picture 2, 0", "picture 2, 1", "a"]
    none = prompt().keep(torch.tensor([False, False, True, False, False, True]))
    assert none.picture_inputs == {}


def test_pictures_on_the_second_axis_and_packed_patches_are_selected():
    pictures = prompt().pictures
    keeps = torch.tensor([False, False, True, True, True, True])
    tiles = {"pixel_values": torch.arange(2.0).reshape(1, 2, 1, 1, 1)}
    assert drop_pictures(pictures, tiles, keeps)[1]["pixel_values"].flatten().tolist() == [1]
    packed = {
        "pixel_values": torch.arange(6.0)[:, None],
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 1, 2]]),
    }
    _, inputs = drop_pictures(pictures, packed, keeps)
    assert inputs["pixel_values"].flatten().tolist() == [4, 5]
    assert inputs["image_grid_thw"].tolist() == [[1, 1, 2]]
    with pytest.raises(lm.UnsupportedModelError, match="an entry for each of 2 pictures"):
        drop_pictures(pictures, {"pixel_values": torch.ones(5, 3, 4, 4)}, keeps)


def test_a_part_of_a_picture_cannot_be_dropped():
    with pytest.raises(lm.UnsupportedModelError, match="delete all patches of picture 1 or none"):
        prompt().keep(torch.tensor([False, True, True, True, True, True]))


def test_pictures_that_become_neighbors_are_refused():
    before = prompt().pictures
    after, _ = drop_pictures(before, {}, torch.tensor([True, True, False, True, True, True]))
    with pytest.raises(lm.UnsupportedModelError, match="pictures 1 and 2 would be neighbors"):
        check_neighbors(before, after)
    check_neighbors(before, before)


def test_a_pass_needs_pictures_for_every_example():
    inputs = dict(prompt().picture_inputs)
    joined = join_inputs([inputs, inputs], torch.float64, torch.device("cpu"))
    assert joined["pixel_values"].shape == (4, 3, 4, 4)
    assert joined["pixel_values"].dtype == torch.float64
    with pytest.raises(lm.UnsupportedModelError, match="got none for some"):
        join_inputs([inputs, {}], torch.float64, torch.device("cpu"))


def test_a_picture_is_the_same_from_its_record():
    grid = Grid(1, 2, (4, 5), (4, 8), (4, 4), (4, 4))
    for picture in (Picture(1, (4, 5), grid), Picture(2, (4, 5))):
        assert Picture.from_record(picture.record()) == picture
