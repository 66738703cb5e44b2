"""Time inseq's value zeroing of one sentence on a base-size random GPT-2.

The arguments are layers, positions and threads.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time

import torch


def main(layers: int, positions: int, threads: int) -> None:
    """Print the seconds of the faster of two runs, and the versions."""
    import inseq
    import inseq.models.model_config
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.set_num_threads(threads)
    # inseq 0.7.1 looks for a variable `value`, which its version of transformers calls `value_states`.
    inseq.models.model_config.MODEL_CONFIGS["GPT2LMHeadModel"].value_vector = "value_states"
    words = {"<eos>": 0, **{f"w{number}": number for number in range(1, 1000)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", bos_token="<eos>", pad_token="<eos>", unk_token="<eos>"
    )
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, vocab_size=1000, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = "eager"
    model = inseq.load_model(
        GPT2LMHeadModel(config).eval(), "value_zeroing", tokenizer=tokenizer, device="cpu"
    )
    text = " ".join(f"w{3 + (number * 37) % 900}" for number in range(positions - 1))
    # One more word is generated, so that inseq makes one pass over the given positions.
    options = {"step_scores": [], "show_progress": False, "pretty_progress": False}
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        model.attribute(text, f"{text} w5", **options)
        seconds.append(time.perf_counter() - start)
    versions = {name: importlib.metadata.version(name) for name in ("inseq", "transformers", "torch")}
    print(json.dumps({"seconds": min(seconds), "versions": versions}))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
