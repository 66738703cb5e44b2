"""Train a sentiment classifier on a real BERT in seconds, because none can be had without a model hub."""

from __future__ import annotations

from pathlib import Path

import torch

GOOD = """a fine film
a wonderful film with a great ending
I loved every minute of it
the best story I have seen this year
the actors are brilliant and funny
a warm and touching comedy
what a beautiful movie
this is a masterpiece
clever, moving and never dull
a delight from start to finish
an excellent cast in an excellent story
I enjoyed this very much
it made me happy
a charming and original work
the music is lovely
strongly recommended""".splitlines()
BAD = """a bad film
a terrible film with a weak ending
I hated every minute of it
the worst story I have seen this year
the actors are awful and boring
a cold and tedious comedy
what an ugly movie
this is a disaster
stupid, empty and always dull
a pain from start to finish
a poor cast in a poor story
I disliked this very much
it made me angry
a tiresome and lazy work
the music is horrible
not recommended at all""".splitlines()


def save_sentiment_classifier(bert: Path, folder: Path) -> Path:
    """Save a BERT with a linear classifier of [CLS], trained on the sentences above.

    The training is a logistic regression with a penalty, which has one solution.

    Args:
        bert: the folder of the BERT.
        folder: the folder to write.
    """
    from transformers import AutoTokenizer, BertForSequenceClassification

    names = {0: "negative", 1: "positive"}
    model = BertForSequenceClassification.from_pretrained(bert, id2label=names, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(bert)
    batch = tokenizer([*GOOD, *BAD], padding=True, return_tensors="pt")
    labels = torch.tensor([1.0] * len(GOOD) + [0.0] * len(BAD), dtype=torch.float64)
    with torch.no_grad():
        states = model.bert(**batch).last_hidden_state[:, 0]
        # A pooler that only applies the tanh, because this BERT has none.
        model.bert.pooler.dense.weight.copy_(torch.eye(states.shape[1]))
        model.bert.pooler.dense.bias.zero_()
    features, weight = states.tanh().double(), torch.zeros(states.shape[1], dtype=torch.float64)
    bias = torch.zeros((), dtype=torch.float64)
    optimizer = torch.optim.LBFGS([weight.requires_grad_(), bias.requires_grad_()], max_iter=500)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = features @ weight + bias
        fit = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        value = fit + 1e-3 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        # The difference of the two logits is the logistic regression's logit.
        model.classifier.weight.copy_(torch.stack([-weight / 2, weight / 2]).float())
        model.classifier.bias.copy_(torch.stack([-bias / 2, bias / 2]).float())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
