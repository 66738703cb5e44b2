"""Test the demo of pictures on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import lens_mix as lm
from tests.tiny_models import available, bridge

pytest.importorskip("PIL")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(not available(bridge, "vit"), reason="no TransformerBridge")


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Any:
    from demos import pictures
    from tests.test_pictures import boot

    config = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=224,
        patch_size=56,
    )
    model = boot(transformers.ViTModel(config, add_pooling_layer=False))
    monkeypatch.setattr(pictures, "dinov2", lambda: model)
    return pictures


def test_the_demo_writes_figures_and_a_page(pictures: Any, tmp_path: Path) -> None:
    pictures.main(tmp_path / "new")
    written = {path.name for path in (tmp_path / "new").iterdir()}
    maps = ("attention", "value_norm", "value_zeroing", "attn_res_ln", "rollout", "occlusion")
    assert written == {*(f"{name}.png" for name in maps), "page.html"}


@pytest.mark.parametrize("size", [140, 224])
def test_parts_are_where_their_colors_are(pictures: Any, size: int) -> None:
    picture, count = pictures.draw_picture(size), size // 14
    grid = lm.maps.Grid(count, count, tuple(range(count**2)), (size, size), (14, 14), (14, 14))
    names = np.array(pictures.name_parts(grid))
    assert set(names) == {"sun", "house", "ball", "sky", "meadow"}
    colors = [picture[b - 7, r - 7] for _, _, b, r in map(grid.box, grid.positions)]
    red = np.array([int(r) > 150 > int(g) + 60 for r, g, _ in colors])
    assert set(names[red]) <= {"ball", "house"}
    assert red[names == "ball"].mean() > 0.7


def test_pixels_are_those_of_the_processor(pictures: Any) -> None:
    picture = pictures.draw_picture(28)
    pixels = pictures.as_pixels(picture)
    assert pixels.shape == (3, 28, 28)
    expected = (torch.tensor(picture[3, 5] / 255) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    torch.testing.assert_close(pixels[:, 3, 5], expected.float())
