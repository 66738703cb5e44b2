"""Define the colors of heat maps, for figures and for the picture in a notebook."""

from __future__ import annotations

# The colors go from almost white to almost black in one hue, at equal distances in CIELAB. Equal differences
# of scores then look equal, and the order can be seen by color-blind readers and in gray print.
BLUES = tuple(
    f"#{step}"
    for step in """f9fbfd e3f3fb cce9f7 b4def3 9ed1ed 89c3e6 73b4de 5ca6d6 4296cb
    2985bc 1c75ad 19659f 155690 094680 09376d 0e2b5a 111f47""".split()
)
# ColorBrewer's PuOr: orange is below zero, purple is above. Color-blind readers can distinguish the two.
SIGNED = tuple(
    f"#{step}"
    for step in "7f3b08 b35806 e08214 fdb863 fee0b6 f7f7f7 d8daeb b2abd2 8073ac 542788 2d004b".split()
)
HIDDEN = "#e9e9e9"
MARK = "#d1662c"  # the frame around the largest score


def color_step(share: float, is_signed: bool) -> int:
    """Return the index in `BLUES` or `SIGNED` of a score.

    Args:
        share: The score divided by the end of the scale: 0 to 1, or -1 to 1 if `is_signed`. A larger one has
            the color of the end.
        is_signed: Whether the scale is symmetric around 0.
    """
    colors = SIGNED if is_signed else BLUES
    place = (share + 1) / 2 if is_signed else share
    return round(min(max(place, 0.0), 1.0) * (len(colors) - 1))
