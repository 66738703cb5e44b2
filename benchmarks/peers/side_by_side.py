"""Ask five libraries about the next word of one prompt, and record their code with what it prints.

    python -m benchmarks.peers.side_by_side

writes `benchmarks/peers/results/side_by_side.md`, whose blocks docs/guides/other_tools.md quotes. It needs
an environment of its own with TransformerLens 4, inseq, captum, BertViz, nnsight and one transformers.
inseq asks for an older typeguard than TransformerLens, so install it with --no-deps. `make peers` makes
another environment, with an older transformers.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import io
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).parent / "results" / "side_by_side.md"
PROMPT = (
    "My grandmother was born in Italy. She left the country with her three children after the war, "
    "but all her life she cooked the food of her home and sang to us in"
)


def ask_lens_mix(name: str, model: Any, tokenizer: Any, prompt: str) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    import lens_mix as lm

    bridge = TransformerBridge.boot_transformers(name)
    print(lm.input_map(bridge, prompt, prepend_bos=False).top(3))
    print(lm.run(bridge, prompt, "value_zeroing", prepend_bos=False).top(2, layer=23))


def ask_inseq(name: str, model: Any, tokenizer: Any, prompt: str) -> None:
    import inseq

    attributed = inseq.load_model(model, "integrated_gradients", tokenizer=tokenizer)
    written = {"max_new_tokens": 2}
    out = attributed.attribute(prompt, generation_args=written, n_steps=20, pretty_progress=False)
    for token, scores in out.get_scores_dicts()[0]["target_attributions"].items():
        best = max(scores, key=scores.get)
        print(token, best, f"{scores[best]:.2f}")


def ask_captum(name: str, model: Any, tokenizer: Any, prompt: str) -> None:
    from captum.attr import FeatureAblation, LLMAttribution, TextTokenInput

    ablation = LLMAttribution(FeatureAblation(model), tokenizer)
    found = ablation.attribute(TextTokenInput(prompt, tokenizer), target=" Italian")
    for position in [*found.seq_attr.topk(3).indices, 5]:
        print(found.input_tokens[position], f"{found.seq_attr[position]:.2f}")


def ask_bertviz(name: str, model: Any, tokenizer: Any, prompt: str) -> None:
    from bertviz import head_view

    inputs = tokenizer(prompt, return_tensors="pt")
    attention = model(**inputs, output_attentions=True).attentions
    tokens = tokenizer.convert_ids_to_tokens(inputs.input_ids[0])
    head_view(attention, tokens, layer=23)
    for weight, key in zip(*attention[23][0, :, -1].mean(0).topk(2), strict=True):
        print(tokens[key], f"{weight:.2f}")


def ask_nnsight(name: str, model: Any, tokenizer: Any, prompt: str) -> None:
    from nnsight import TransformersModel

    traced = TransformersModel(model, tokenizer=tokenizer, task="text-generation")
    for zeroed in ([], [5]):
        with traced.trace(prompt):
            traced.model.layers[23].self_attn.v_proj.output[:, zeroed] = 0
            logits = traced.lm_head.output.save()
        print(zeroed, f"{logits[0, -1].softmax(-1)[tokenizer.encode(' Italian')].item():.2f}")


def ask_inseq_for_value_zeroing(name: str, model: Any, tokenizer: Any, prompt: str) -> None:
    import inseq

    attributed = inseq.load_model(model, "value_zeroing", tokenizer=tokenizer)
    try:
        attributed.attribute(prompt, generation_args={"max_new_tokens": 1})
    except TypeError as problem:
        print(f"TypeError: {problem}")


# The distribution, and what is asked of it. Each has a model of its own, because some leave hooks on it.
ASKED: dict[str, Callable[..., None]] = {
    "lens_mix": ask_lens_mix,
    "inseq": ask_inseq,
    "captum": ask_captum,
    "bertviz": ask_bertviz,
    "nnsight": ask_nnsight,
    "inseq: value_zeroing": ask_inseq_for_value_zeroing,
}


def read_code(function: Callable[..., None]) -> str:
    """Return the body of a function as a block of code."""
    _, body = inspect.getsource(function).split(" -> None:\n", 1)
    return textwrap.dedent(body)


def main() -> None:
    """Run every library and write the record."""
    sys.path.insert(0, str(ROOT / "demos"))
    import models
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = str(models.smollm2_folder())
    tokenizer = AutoTokenizer.from_pretrained(name)
    packages = ("transformer_lens", "inseq", "captum", "bertviz", "nnsight", "transformers", "torch")
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    parts = [
        f"# One prompt, five libraries\n\n{models.ABOUT}. The prompt:\n\n> {PROMPT}\n\nWith {versions}.\n"
    ]
    for title, function in ASKED.items():
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager").eval()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            function(name, model, tokenizer, PROMPT)
        shown = "\n".join(line for line in printed.getvalue().splitlines() if "IPython" not in line)
        parts.append(f"## {title}\n\n```python\n{read_code(function)}```\n\n```text\n{shown.strip()}\n```\n")
        print(parts[-1], flush=True)
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
