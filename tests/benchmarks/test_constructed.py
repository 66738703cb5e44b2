"""Test the results on constructed models: a row per model, a dash and a reason for what does not run."""

from __future__ import annotations

from benchmarks.constructed.__main__ import TITLES, format_page
from lens_mix.experiments import constructed_models, score_constructed


def test_the_page_has_every_area_and_every_reason() -> None:
    models = constructed_models()
    frame = score_constructed(
        ["attention", "atb_ff", "decompx", "gradient_attention"],
        [models["copy"], models["rasp_fraction"]],
        count=2,
    )
    page = format_page(frame, 2, 1.0)
    sections = {part.split("\n")[0]: part for part in page.split("\n## ")[1:]}
    assert list(sections) == [*TITLES.values(), "Methods that do not run"]
    layers = frame[(frame.model == "copy") & (frame.aggregation == "layers")].set_index("method").area
    expected = f"| copy | {layers['position']:.2f} | {layers['attention']:.2f} | – |"
    assert expected in sections["Layer maps"]
    assert "| rasp_fraction |" in sections["Gradient rollouts"]
    (reason,) = [line for line in sections["Methods that do not run"].split("\n") if "atb_ff" in line]
    assert reason.startswith("| `atb_ff` | `copy` | expected a plain or gated feed-forward")
