import numpy
import pytest

canvas = pytest.importorskip("lens_mix.view.canvas")


def lightness(colors: numpy.ndarray) -> numpy.ndarray:
    """Return CIELAB L* of sRGB colors `[color, rgb]`, 0 to 100 (IEC 61966-2-1, CIE 15)."""
    linear = numpy.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    luminance = linear @ numpy.array([0.2126, 0.7152, 0.0722])
    return numpy.where(luminance > 0.008856, 116 * numpy.cbrt(luminance) - 16, 903.3 * luminance)


def test_the_colors_keep_their_order_in_grey() -> None:
    steps = numpy.array(canvas._make_color_map(signed=False)(numpy.linspace(0, 1, 101)))[:, :3]
    fall = -numpy.diff(lightness(steps))
    assert lightness(steps)[0] > 95
    assert lightness(steps)[-1] < 20
    assert fall.min() > 0
    # In a perceptually even scale, no step is much larger than another.
    assert fall.max() / fall.min() < 3


@pytest.mark.parametrize("signed", [False, True])
def test_masked_entries_have_a_color_that_no_score_has(signed: bool) -> None:
    colors = canvas._make_color_map(signed)
    masked = colors(numpy.ma.masked_array([0.5], [True]))[0][:3]
    scores = numpy.array(colors(numpy.linspace(0, 1, 256)))[:, :3]
    assert numpy.abs(scores - masked).max(1).min() > 0.02


def test_longest_reads_a_dollar_sign_as_itself() -> None:
    assert canvas.measure_longest(["$x$", "a"], 7) == pytest.approx(canvas.measure_longest(["SxS"], 7))
    assert canvas.measure_longest(["mm"], 14) > 1.9 * canvas.measure_longest(["mm"], 7)
    assert canvas.measure_longest([" ", ""], 7) == 0
