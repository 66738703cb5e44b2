from __future__ import annotations

import json

import pytest
import torch

import lens_mix as lm
from lens_mix.maps.explained import Explained
from lens_mix.report import describe_maps, to_records

TOKENS = ["<s>", " a", "\n"]


def causal_map(scores, **options):
    explained = [Explained(), Explained(" b", 0.5), Explained(" c", 0.25)]
    return lm.MixingMap(
        scores=torch.tensor(scores),
        tokens=TOKENS,
        method="attention",
        causal=True,
        provenance={"model": "/home/me/models--org--small/snapshots/0123456789abcdef0123"},
        explained=explained,
        **options,
    )


LAYERS = [
    [[1.0, 0, 0], [0.5, 0.5, 0], [0.5, 0.3, 0.2]],
    [[1.0, 0, 0], [0.0, 1.0, 0], [2.0, 1.0, 7.0]],
]


def test_the_answer_as_text():
    assert describe_maps({"attention": causal_map(LAYERS)}, every_row=False).splitlines() == [
        "org/small, 3 tokens",
        "after '\\n': ' c' 0.25",
        "",
        "attention: how much a position attends to each token",
        "  at ⏎ (2): mean share of 2 layers, and the largest one",
        "    45.0%    70.0% in layer 1    ⏎ (2)",
        "    20.0%    30.0% in layer 0    ·a (1)",
        "    35.0%    50.0% in layer 0    <s> (0), the first token",
    ]


def test_every_row_as_text_and_each_note_once():
    m = causal_map(LAYERS, notes=("take care",))
    lines = describe_maps({"mine": m, "yours": m}, every_row=True).splitlines()
    row = "  at ·a (1), which predicts ' b' 0.50: mean share of 2 layers, and the largest one"
    assert lines.count(row) == 2
    assert "mine, by attention: how much a position attends to each token" in lines
    assert lines.count("note: take care") == 1


def test_maps_with_heads_name_the_strongest_heads():
    m = causal_map([[LAYERS[0], LAYERS[1]]])
    lines = describe_maps({"attention": m}, every_row=False).splitlines()
    assert lines[-1] == "  heads with the most of ⏎ (2): layer 0 head 1 70.0%, layer 0 head 0 20.0%"


def test_input_maps_have_one_share_and_keep_their_sign():
    m = causal_map([[[1.0, 0, 0], [0.5, 0.5, 0], [3.0, -6.0, 1.0]]], kind="input")
    lines = describe_maps({"mine": m}, every_row=False).splitlines()
    assert lines[-4:] == [
        "  at ⏎ (2): share, all layers together",
        "   -60.0%  ·a (1)",
        "    30.0%  <s> (0)",
        "    10.0%  ⏎ (2)",
    ]


def test_input_maps_of_several_layers_are_those_up_to_the_last_one():
    lines = describe_maps({"mine": causal_map(LAYERS, kind="input")}, every_row=False).splitlines()
    assert lines[-4:] == [
        "  at ⏎ (2): share, all layers together",
        "    70.0%  ⏎ (2)",
        "    20.0%  <s> (0)",
        "    10.0%  ·a (1)",
    ]


def test_the_answer_as_json():
    m = causal_map(LAYERS)
    record = to_records({"mine": m}, every_row=False)
    assert json.loads(json.dumps(record)) == record
    assert (record["model"], record["tokens"]) == ("org/small", TOKENS)
    mine = record["maps"]["mine"]
    assert (mine["method"], mine["layers"], mine["keys"]) == ("attention", [0, 1], TOKENS)
    (row,) = mine["rows"]
    assert (row["position"], row["token"]) == (2, "\n")
    assert row["explained"] == {"prediction": " c", "probability": 0.25}
    assert torch.tensor(row["scores"]).equal(m.scores[:, 2])
    assert [source["position"] for source in row["sources"]] == [2, 0, 1]
    assert row["sources"][0] == {
        "token": "\n",
        "position": 2,
        "share": pytest.approx(0.45),
        "largest": pytest.approx(0.7),
        "layer": 1,
    }
    every = to_records({"mine": m}, every_row=True)["maps"]["mine"]["rows"]
    assert [row["position"] for row in every] == [0, 1, 2]
    assert every[0]["explained"] == {}
    assert [source["position"] for source in every[0]["sources"]] == [0]
