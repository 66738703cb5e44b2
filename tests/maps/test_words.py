"""Test the marks of WordPiece at their shortest: one character after the mark, and the mark alone."""

from lens_mix.maps.words import spell


def test_one_letter_continues_a_word_and_the_mark_alone_does_not():
    spelled = [text for _, text in spell(["the", "cat", "##s", "##", "##ing"])]
    assert spelled == [" the", " cat", "s", " ##", "ing"]
