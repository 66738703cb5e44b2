from __future__ import annotations

import pytest

from benchmarks import corpus
from tests.tiny_models import available, bridge

pytestmark = pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge here")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_runs_lose_nothing(ranks):
    found = corpus.count_lost(3, ranks, prompts=200)
    assert found["kills"] == 3
    lost = ("rows lost", "rows doubled", "files with other bytes")
    assert {name: found[name] for name in lost} == dict.fromkeys(lost, 0)
