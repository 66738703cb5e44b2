import itertools

import pytest

from lens_mix.view.labels import (
    count_labels,
    make_row_visible,
    make_visible,
    name_method,
    name_model,
    space_evenly,
)


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
    positions = space_evenly(count, room)
    assert len(positions) <= room
    assert positions[0] == 0
    assert positions == sorted(set(positions))
    assert positions[-1] < count
    gaps = [after - before for before, after in itertools.pairwise(positions)]
    assert min(gaps, default=count) >= min(count, -(-count // room))
    if room > 1:
        assert positions[-1] == count - 1


def test_all_positions_are_shown_where_there_is_room() -> None:
    assert space_evenly(5, 5) == [0, 1, 2, 3, 4]


def test_room_grows_with_space_and_is_never_nothing() -> None:
    assert count_labels(0.01, 7) == 1
    assert count_labels(2, 7) < count_labels(4, 7)
    # 2 inches are 144 points, and a line of a 7-point font needs more than 7 of them.
    assert 10 <= count_labels(2, 7) <= 20


@pytest.mark.parametrize(("model", "name"), [("/home/ann/models/llama-3", "llama-3"), (None, ""), (7, "")])
def test_the_name_of_a_model_is_never_a_path(model: object, name: str) -> None:
    assert name_model({"model": model}) == name


def test_a_map_without_a_model_has_no_name() -> None:
    assert name_model({}) == ""


def test_a_row_is_labeled_with_its_prediction() -> None:
    assert make_row_visible(", → which") == ", → which"
    assert make_row_visible(" in") == "·in"


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("value_zeroing", "Value Zeroing"),
        ("alti_logit", "ALTI Logit"),
        ("atb_ff_res_ln", "AtB FF Res LN"),
        ("MyMethod 2", "MyMethod 2"),
    ],
)
def test_names_of_methods_as_titles(name, title):
    assert name_method(name) == title
