"""Find the prompts that a model answers rightly, what it writes, and what removals do to it.

    python -m benchmarks.traces.gold smollm2 choose needle 8        (or gemma3, held_out, another family)

Each accepted prompt has a file in `outputs/traces/MODEL/HALF/FAMILY/`. A removal deletes the tokens of some
pieces from the prompt, and measures the log probability of the written tokens. Families:

- needle, variables, injection: greedy decoding must give the right answer. The gold sentences are
  known. For variables and injections every sentence is removed. The removal of the injected sentence, and of
  some sentence with variables, must lower the log probability by at least 1 nat.
- conflict: the model must answer with one of the two values. The gold passage is the one whose removal lowers
  the log probability most. Every sentence is removed, too.
- statement: what the model writes, up to the end of its sentence or 24 tokens. Every sentence is removed,
  and so are 20 random sets, in which each sentence is kept with probability 1/2. The gold sentence is the
  one with the largest effect, which must be at least 1 nat.

A family of long prompts has needles, conflicts and variables. There only what the gold needs is removed: the
two passages that disagree, and the gold sentences of variables.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from benchmarks.input_map.importance import load
from benchmarks.traces.prompts import LENGTHS, TracePrompt, make, make_long

MASKS = 20
# An effect below this many nats does not show where the text came from.
LEAST_EFFECT = 1.0
# In prompts of more tokens, not every sentence is removed, because that takes dozens of long passes.
LONG = 400
REMOVED_BY_FAMILY = ("variables", "conflict", "injection", "statement")


@dataclasses.dataclass
class Record:
    """An accepted prompt, as it is stored.

    Attributes:
        name: The family and the kind.
        number: The number of the candidate.
        tokens: The prompt's tokens and then the written ones.
        n_prompt: The number of the prompt's tokens.
        piece_of: The number of each prompt token's piece; -1 for the model's first token.
        document_of: The document of each piece; -1: none.
        gold: The numbers of the gold pieces.
        deciding: The positions of the tokens that decide.
        log_p: The log probability of the written tokens.
        sentences: The numbers of the pieces that are sentences of documents.
        effects: The drop of the log probability if one sentence is removed, in the order of `sentences`.
        document_effects: The drop if a whole document is removed, in the order of the documents. In a long
            conflict, only of the two that disagree.
        masks: Which sentences are kept, for each random set.
        mask_log_p: The log probability for each random set.
        drops: The drop for removed sets of sentences, by their numbers.
        seconds: The time of the removals.
    """

    name: str
    number: int
    tokens: Int[Tensor, " pos"]
    n_prompt: int
    piece_of: Int[Tensor, " prompt"]
    document_of: list[int]
    gold: list[int]
    deciding: list[int]
    log_p: float = 0.0
    sentences: list[int] = dataclasses.field(default_factory=list)
    effects: list[float] = dataclasses.field(default_factory=list)
    document_effects: list[float] = dataclasses.field(default_factory=list)
    masks: list[list[bool]] = dataclasses.field(default_factory=list)
    mask_log_p: list[float] = dataclasses.field(default_factory=list)
    drops: dict[tuple[int, ...], float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def family(self) -> str:
        """The family."""
        return self.name.split(",")[0]

    @property
    def n_written(self) -> int:
        """The number of written tokens."""
        return len(self.tokens) - self.n_prompt

    @property
    def rows(self) -> list[int]:
        """The positions whose outputs are the written tokens."""
        return list(range(self.n_prompt - 1, len(self.tokens) - 1))

    def positions_of(self, pieces: Sequence[int]) -> list[int]:
        """Return the positions of some pieces' tokens."""
        chosen = set(pieces)
        return [position for position, piece in enumerate(self.piece_of.tolist()) if piece in chosen]


def folder(model_name: str, half: str, family: str) -> Path:
    """Return the folder of the records of one model, half and family."""
    path = Path("outputs") / "traces" / model_name / half / family
    path.mkdir(parents=True, exist_ok=True)
    return path


def records(model_name: str, half: str, family: str) -> Iterator[tuple[Path, Record]]:
    """Yield the stored records of one model, half and family, with their files."""
    for path in sorted(folder(model_name, half, family).glob("*.record.pt")):
        yield path, Record(**torch.load(path, weights_only=False))


def store(path: Path, record: Record) -> None:
    """Write a record to its file."""
    torch.save({field.name: getattr(record, field.name) for field in dataclasses.fields(record)}, path)


def tokenize(tokenizer: Any, prompt: TracePrompt) -> tuple[Int[Tensor, " prompt"], Int[Tensor, " prompt"]]:
    """Return the tokens of a prompt after the model's first token, and the number of each token's piece.

    A token belongs to the piece of its last character, because a token may begin with a space.
    """
    encoded = tokenizer(prompt.text, add_special_tokens=False, return_offsets_mapping=True)
    ends, stop = [], 0
    for piece in prompt.pieces:
        stop += len(piece.text)
        ends.append(stop)
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    owners = [next(i for i, end in enumerate(ends) if last <= end) for _, last in encoded["offset_mapping"]]
    return torch.tensor(first + encoded["input_ids"]), torch.tensor([-1] * len(first) + owners)


def find_deciding(tokenizer: Any, prompt: TracePrompt, gold: Sequence[int], n_first: int) -> list[int]:
    """Return the positions of the deciding values' tokens in the gold pieces."""
    offsets = tokenizer(prompt.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    found, start = [], 0
    for number, piece in enumerate(prompt.pieces):
        for value in prompt.values if number in gold else ():
            place = piece.text.find(value)
            if place >= 0:
                begin, end = start + place, start + place + len(value)
                found += [n_first + i for i, (_, last) in enumerate(offsets) if begin < last <= end]
        start += len(piece.text)
    return sorted(set(found))


@torch.no_grad()
def write(model: Any, tokenizer: Any, tokens: Int[Tensor, " prompt"], prompt: TracePrompt) -> Tensor | None:
    """Return the tokens that the model writes by greedy decoding; None if the answer is wrong."""
    ends = {token for token in (tokenizer.eos_token_id,) if token is not None}
    cache, step, written = DynamicCache(), tokens, []
    limit = prompt.n_written
    if prompt.answers:
        limit = 3 + max(
            len(tokenizer(each, add_special_tokens=False)["input_ids"]) for each in prompt.answers
        )
    while len(written) < limit:
        logits = model(step[None], past_key_values=cache, logits_to_keep=1).logits[0, -1]
        token = int(logits.argmax())
        if token in ends:
            break
        written.append(token)
        step = torch.tensor([token])
        text = tokenizer.decode(written)
        if prompt.answers:
            if any(text.startswith(answer) for answer in prompt.answers):
                return torch.tensor(written)
            if not any(answer.startswith(text.rstrip()) for answer in prompt.answers):
                return None
        elif "\n" in text:
            written.pop()
            break
        elif text.endswith((".", "!", "?")):
            break
    return None if prompt.answers or len(written) < 4 else torch.tensor(written)


@torch.no_grad()
def log_p_of(model: Any, tokens: Int[Tensor, " pos"], n_written: int) -> float:
    """Return the log probability of the last `n_written` tokens."""
    logits = model(tokens[None], logits_to_keep=n_written + 1).logits[0, :-1].float()
    return float(logits.log_softmax(-1).gather(-1, tokens[-n_written:, None]).sum())


@torch.no_grad()
def log_p_without(model: Any, record: Record, pieces: Sequence[int]) -> float:
    """Return the log probability of the written tokens if the tokens of some pieces are deleted."""
    keep = torch.ones(len(record.tokens), dtype=torch.bool)
    keep[record.positions_of(pieces)] = False
    return log_p_of(model, record.tokens[keep], record.n_written)


@torch.no_grad()
def remove_each(model: Any, record: Record, groups: Sequence[Sequence[int]]) -> Float[Tensor, " group"]:
    """Return the drop of the log probability if the tokens of each group of pieces are deleted.

    The pieces of a group are neighbours. What is before them is computed once for all groups.
    """
    whole = DynamicCache()
    model(record.tokens[None], past_key_values=whole, logits_to_keep=1)
    kept = [(layer.keys, layer.values) for layer in whole.layers]
    found = []
    for group in groups:
        positions = record.positions_of(group)
        start, rest = positions[0], record.tokens[positions[-1] + 1 :]
        cache = DynamicCache()
        for number, (keys, values) in enumerate(kept):
            cache.update(keys[:, :, :start].clone(), values[:, :, :start].clone(), number)
        logits = model(rest[None], past_key_values=cache, logits_to_keep=record.n_written + 1).logits
        log_p = logits[0, :-1].float().log_softmax(-1)
        found.append(record.log_p - float(log_p.gather(-1, rest[-record.n_written :, None]).sum()))
    return torch.tensor(found)


def accept(model: Any, tokenizer: Any, prompt: TracePrompt, number: int) -> Record | None:
    """Return the record of a candidate, with its removals; None if the model does not answer it."""
    tokens, piece_of = tokenize(tokenizer, prompt)
    written = write(model, tokenizer, tokens, prompt)
    if written is None:
        return None
    documents = [-1 if piece.document is None else piece.document for piece in prompt.pieces]
    gold = [i for i, piece in enumerate(prompt.pieces) if piece.is_gold]
    whole = torch.cat([tokens, written])
    record = Record(prompt.name, number, whole, len(tokens), piece_of, documents, gold, [])
    record.sentences = [i for i, document in enumerate(documents) if document >= 0]
    start = time.process_time()
    record.log_p = log_p_of(model, whole, len(written))
    if prompt.family in REMOVED_BY_FAMILY and not _measure(model, prompt, record):
        return None
    record.seconds = time.process_time() - start
    record.deciding = find_deciding(tokenizer, prompt, record.gold, len(tokens) - int((piece_of >= 0).sum()))
    return record


def _measure(model: Any, prompt: TracePrompt, record: Record) -> bool:
    """Make the removals of a record, and return whether the largest effect is large enough."""
    if record.n_prompt <= LONG:
        record.effects = remove_each(model, record, [[each] for each in record.sentences]).tolist()
    if prompt.family == "conflict":
        claims = range(len(record.document_of)) if record.effects else record.gold
        numbers = sorted({record.document_of[piece] for piece in claims} - {-1})
        groups = [[i for i, each in enumerate(record.document_of) if each == number] for number in numbers]
        record.document_effects = remove_each(model, record, groups).tolist()
        by_number = dict(zip(numbers, record.document_effects, strict=True))
        used = max(numbers, key=lambda number: by_number[number])
        record.gold = [piece for piece in record.gold if record.document_of[piece] == used]
        return bool(record.gold) and by_number[used] >= LEAST_EFFECT
    if prompt.family == "variables":
        effects = record.effects or remove_each(model, record, [[each] for each in record.gold]).tolist()
        return max(effects) >= LEAST_EFFECT
    if prompt.family == "injection":
        return record.effects[record.sentences.index(record.gold[0])] >= LEAST_EFFECT
    record.gold = [record.sentences[int(torch.tensor(record.effects).argmax())]]
    if max(record.effects) < LEAST_EFFECT:
        return False
    draw = random.Random(f"masks {record.name} {record.number}")
    record.masks = [[draw.random() < 0.5 for _ in record.sentences] for _ in range(MASKS)]
    for mask in record.masks:
        removed = [piece for piece, is_kept in zip(record.sentences, mask, strict=True) if not is_kept]
        record.mask_log_p.append(log_p_without(model, record, removed))
    return True


def main(model_name: str, half: str, family: str, count: str) -> None:
    """Store the records of the first prompts that the model answers."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_name)
    find(model, tokenizer, model_name, half, family, int(count))


def find(model: Any, tokenizer: Any, model_name: str, half: str, family: str, count: int) -> None:
    """Store the records of the first `count` prompts of a family that the model answers."""
    place, start = folder(model_name, half, family), time.time()
    done = sorted(int(path.name.split(".")[0]) for path in place.glob("*.record.pt"))
    tried = int((place / "tried.txt").read_text()) if (place / "tried.txt").exists() else 0
    candidates = make_long(half, family) if family in LENGTHS else make(half, family)
    for number, prompt in enumerate(candidates):
        if len(done) >= count or number > 12 * count + 60:
            break
        if number < tried:
            continue
        record = accept(model, tokenizer, prompt, number)
        if record is not None:
            store(place / f"{number:04d}.record.pt", record)
            done.append(number)
        (place / "tried.txt").write_text(str(number + 1))
    tried = int((place / "tried.txt").read_text())
    print(
        f"{model_name} {half} {family}: {len(done)} of {tried} candidates, {time.time() - start:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
