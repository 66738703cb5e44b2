"""Make audits without a model, for the tests of what is shown of them."""

from __future__ import annotations

from lens_mix.traces.audit import Audit
from lens_mix.traces.claims import Claim, Contradiction, Ground
from lens_mix.traces.removals import Removal
from lens_mix.traces.trace import Trace


def find_sources(t: Trace) -> list:
    """Return the sentences of the documents: two of the report and one of the press note."""
    return [source for source in t.sources("sentence") if source.kind == "document"]


def remove(source, loss: float, probability: float = 0.01) -> Removal:
    return Removal((source,), loss, probability)


def plant_audit(t: Trace, is_in_parts: bool = False) -> Audit:
    """Return an audit of a trace of `make_trace`, which is also the trace's own.

    Its claims are the two sentences: one conflicts with a source, and the other one is redundant. In parts,
    they are "cat slept" (redundant), "did so" (which repeats it), "for" (from memory) and "hours" (unclear).
    """
    first, second, third = find_sources(t)
    memory = Removal((first, second, third), 9.5, 0.002)
    needed = Ground("cat", (1,), (first,), 6.25, "dog barked", (0.93,))
    enough = Ground("slept", (2,), (second, first), 4.5, "ran", (0.61, 1.04))
    alone = (remove(first, 6.25, 0.003), remove(second, 0.75, 0.1), remove(third, -0.25, 0.2))
    against = (Contradiction((third,), 2, " bark", 3.5, 1.0),)
    if is_in_parts:
        redundant = Claim(t["cat slept"], "redundant", memory, "", (1, 2), (enough,), alone)
        nothing = Removal((first, second, third), 0.5, 0.3)
        claims = [
            redundant,
            Claim(t["did so"], "redundant", nothing, "", (5,), (enough,), alone, follows=redundant.span),
            Claim(t[7:8], "from memory", nothing),
            Claim(t["hours"], "unclear", Removal((), 0.0, 1.0), "the budget of passes was too small"),
        ]
    else:
        claims = [
            Claim(t.spans[0], "conflicting", memory, "", (1, 2), (needed, enough), alone, against),
            Claim(t.spans[1], "redundant", memory, "", (6,), (enough,), alone[:2]),
        ]
    for claim in claims:
        assert claim.span.scores is not None
    kept = [source for source in t.sources() if source.kind in ("instruction", "question")]
    t._computed["audit"] = found = Audit(t, claims, kept, 17)
    return found
