"""Occlusion along direct paths: one pass over copies of the tokens, under a mask of its own."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def direct_occlusion(
    model, tokens: Tensor, replacement: Tensor, window: int = 0, hubs: list[int] | None = None
):
    """abs(Δ log p(answer)) per token when it is replaced, through its direct path to the last position.

    One pass over the prompt and copies of its tokens: for every j a copy of j with another embedding, which
    sees the clean tokens before it; copies of the `window` tokens after j (and of `hubs`), which see those
    copies in the place of the originals; and a copy of the last token, which sees them too. Other tokens stay
    as they were: what j does through them is left out.
    """
    count = len(tokens)
    embed = model.get_input_embeddings()
    clean = embed(tokens)
    rows, positions, masks = [clean], list(range(count)), []
    blocked = torch.finfo(clean.dtype).min
    last = count - 1
    sees = torch.tril(torch.ones(count, count, dtype=torch.bool))
    masks = [torch.nn.functional.pad(row, (0, 0)) for row in sees]
    readers = []
    entries = []  # (position, embedding, visible clean set, visible copies)
    for j in range(count):
        chain = sorted({k for k in (*range(j + 1, j + 1 + window), *(hubs or [])) if j < k < last})
        own = []
        start = count + len(entries)
        for place in [j, *chain] + ([last] if j != last else []):
            visible = torch.zeros(count, dtype=torch.bool)
            visible[:place] = True
            replaced = [p for p, _ in own]
            visible[replaced] = False
            index = count + len(entries)
            copies = [i for _, i in own] + [index]
            entries.append((place, replacement if place == j else clean[place], visible, copies))
            own.append((place, index))
        readers.append(own[-1][1])
    total = count + len(entries)
    mask = torch.zeros(total, total, dtype=torch.bool)
    mask[:count, :count] = sees
    for number, (place, _, visible, copies) in enumerate(entries):
        mask[count + number, :count] = visible
        mask[count + number, copies] = True
    vectors = torch.cat([clean, torch.stack([vector for _, vector, _, _ in entries])])
    places = torch.tensor([*range(count), *(place for place, _, _, _ in entries)])
    additive = torch.zeros(1, 1, total, total).masked_fill(~mask, blocked)
    given = additive
    if "gemma3" in model.config.model_type:
        given = {"full_attention": additive, "sliding_attention": additive}
    hidden = model.model(
        inputs_embeds=vectors[None], attention_mask=given, position_ids=places[None], use_cache=False
    ).last_hidden_state[0]
    wanted = hidden[[last, *readers]]
    logits = model.lm_head(wanted)
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap:
        logits = torch.tanh(logits / cap) * cap
    log_p = logits.log_softmax(-1)
    answer = int(log_p[0].argmax())
    kl = (log_p[0].exp() * (log_p[:1] - log_p[1:])).sum(-1)
    return (log_p[0, answer] - log_p[1:, answer]).abs(), kl, answer
