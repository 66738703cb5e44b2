import itertools

import pytest

from lens_mix.view.labels import _space_evenly, count_labels, make_visible


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" Tower", "·Tower"),
        ("ĠTower", "·Tower"),
        ("▁Tower", "·Tower"),
        ("\n", "⏎"),
        ("Ċ", "⏎"),
        ("\n\n  x", "⏎⏎··x"),
        ("\t", "⇥"),
        ("", "∅"),
        ("\x07", "\\x07"),
        ("\u200b", "\\u200b"),
        ("été", "été"),
        ("<|im_start|>", "<|im_start|>"),
        ("é[1/2]", "é[1/2]"),
        ("internationalisation[3/4]", "internationalis…[3/4]"),
        ("👩\u200d🚀[1/11]", "👩\u200d🚀[1/11]"),
        ("a\u200db", "a\\u200db"),
        ("internationalisation", "internationalis…"),
    ],
)
def test_a_token_is_one_line_of_visible_characters(token: str, shown: str) -> None:
    assert make_visible(token) == shown


@pytest.mark.parametrize("count", [1, 2, 7, 10, 36, 100])
@pytest.mark.parametrize("room", [1, 2, 3, 9, 10, 50])
def test_shown_positions_fit_and_keep_their_distance(count: int, room: int) -> None:
    positions = _space_evenly(count, room)
    assert len(positions) <= room
    assert positions[0] == 0
    assert positions == sorted(set(positions))
    assert positions[-1] < count
    gaps = [after - before for before, after in itertools.pairwise(positions)]
    assert min(gaps, default=count) >= min(count, -(-count // room))
    if room > 1:
        assert positions[-1] == count - 1


def test_all_positions_are_shown_where_there_is_room() -> None:
    assert _space_evenly(5, 5) == [0, 1, 2, 3, 4]


def test_room_grows_with_space_and_is_never_nothing() -> None:
    assert count_labels(0.01, 7) == 1
    assert count_labels(2, 7) < count_labels(4, 7)
    # 2 inches are 144 points, and a line of a 7-point font needs more than 7 of them.
    assert 10 <= count_labels(2, 7) <= 20
