"""A Hugging Face Space: type a prompt, choose methods, and see what the model says and where that came from.

    python demos/space/app.py [MODEL]

MODEL is the name of a model on the hub or a local folder; without it, the one in LENS_MIX_MODEL, or SmolLM2.
"""

from __future__ import annotations

import dataclasses
import html
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

# Set before gradio and transformers are imported, which read them then.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import gradio as gr

import lens_mix as lm
from lens_mix import registry
from lens_mix._classes.model_names import strip_path
from lens_mix.named_maps import DEFAULT_METHODS, INPUT_MAP, compute_maps
from lens_mix.serve.answers import Limits, Workshop
from lens_mix.serve.estimate import measure_pace
from lens_mix.serve.forms import Request

MODEL = "HuggingFaceTB/SmolLM2-135M"
# A free Space has two cores, and everybody waits for the prompt of the first in the queue.
LIMITS = Limits(tokens=64, seconds=60.0, waiting=16)
EXAMPLES = [
    "My grandmother was born in Italy. She left the country with her three children after the war, "
    "but all her life she cooked the food of her home and sang to us in",
    "The Eiffel Tower is in the city of",
    "The keys to the old wooden cabinet that stands in the hall",
]
_STYLE = "#page iframe{display:block;width:100%;height:85vh;border:0;outline:1px solid #8886}"
# The page in the frame reports its height. A frame that is as high has no scroll bar of its own.
_SCRIPT = """() => addEventListener("message", event => {
  for (const frame of document.querySelectorAll("#page iframe"))
    if (event.source === frame.contentWindow && event.data && event.data.lensMixHeight)
      frame.style.height = Math.min(event.data.lensMixHeight, 5000) + "px"
})"""
# The web fonts of gradio's themes would be fetched from another server.
_THEME = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])


def load(name: str) -> Any:
    """Return a TransformerBridge of a model on the hub or in a folder."""
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(name)


def offered_methods(support: Iterable[tuple[str, str | None, str]]) -> list[str]:
    """Return the names of the methods that can run on the model of a table of support, `input_map` first."""
    reasons = {name: reason for name, _, reason in support}
    return [name for name in registry.list_names() if name == INPUT_MAP or reasons.get(name) == ""]


def find_mistake(workshop: Workshop, prompt: str, names: Sequence[str]) -> str:
    """Return why a request is not computed, and what to do; "" if it is."""
    if not prompt.strip():
        return "There is no prompt. Type one above."
    if not names:
        return "No method is chosen. Choose one or several above."
    request = Request(prompt, tuple(names))
    expected = workshop.estimate(request)
    if expected.tokens > LIMITS.tokens:
        return f"This prompt has {workshop.describe(request)}. Shorten it."
    if expected.total > LIMITS.seconds:
        return f"This prompt has {workshop.describe(request)}. Choose fewer methods, or shorten it."
    return ""


def compute(model: Any, prompt: str, target: str, names: Sequence[str]) -> dict[str, lm.MixingMap]:
    """Return the maps by the names of the methods; those that explain a target explain this token, if any."""
    methods = registry.all_methods()
    explaining = [name for name in names if name != INPUT_MAP and methods[name]().target is not None]
    if not target:
        return compute_maps(model, prompt, names)
    maps: dict[str, lm.MixingMap] = {}
    if INPUT_MAP in names:
        maps[INPUT_MAP] = lm.input_map(model, prompt, target=target)
    if explaining:
        targeted = [dataclasses.replace(methods[name](), target=target) for name in explaining]
        maps |= lm.run(model, prompt, targeted, queries=[-1])
    others = [name for name in names if name not in maps]
    maps |= compute_maps(model, prompt, others) if others else {}
    return {name: maps[name] for name in names}


def describe(maps: dict[str, lm.MixingMap]) -> str:
    """Return what the model predicts, what is explained, and the strongest tokens of the first map."""
    name, first = next(iter(maps.items()))
    row = first.row_index(None)
    explained = first.explained[row] if first.explained else None
    sentences = []
    if explained and explained.prediction is not None:
        place = f"{'After' if first.predicts_next else 'At'} {first.query_labels[row]!r}"
        sentences += [f"{place}, the model predicts {explained.prediction!r} ({explained.probability:.0%})."]
    if explained and explained.target is not None:
        sentences += [f"Explained: {explained.target} = {explained.value:.3g}."]
    strongest = ", ".join(repr(source.token) for source in first.top(3))
    return " ".join([*sentences, f"The strongest tokens by {name}: {strongest}."])


def frame(page: str) -> str:
    """Return the HTML of a frame with the page, which can neither read this site nor open a connection."""
    return (
        f'<iframe title="Maps of the prompt" srcdoc="{html.escape(page)}" '
        'sandbox="allow-scripts allow-downloads" allow="fullscreen"></iframe>'
    )


def answer(workshop: Workshop, prompt: str, target: str, names: Sequence[str]) -> tuple[str, str]:
    """Return a sentence and the frame of the page; after a mistake the sentence says it, without a frame."""
    try:
        mistake = find_mistake(workshop, prompt, names)
        if mistake:
            return mistake, ""
        maps = compute(workshop.model, prompt, target, names)
    except (ValueError, TypeError, lm.UnsupportedModelError) as problem:
        return f"This can't be computed: {problem}", ""
    except Exception as problem:
        traceback.print_exception(problem, file=sys.stderr)
        return f"An unexpected error ended the computation: {type(problem).__name__}: {problem}", ""
    return describe(maps), frame(lm.page(maps).html)


def build(model: Any) -> gr.Blocks:
    """Return the app for a loaded model."""
    support = lm.support(model)
    workshop, offered = Workshop(model, LIMITS, measure_pace(model)), offered_methods(support)
    name = strip_path(support.model)
    with gr.Blocks(title="lens_mix", analytics_enabled=False) as app:
        gr.Markdown(
            f"# Which tokens did the prediction come from?\nThe model is {name}. "
            f"A prompt may have {LIMITS.tokens} tokens, and one prompt is computed at a time."
        )
        prompt = gr.Textbox(EXAMPLES[0], label="Prompt", lines=2, max_lines=6)
        with gr.Row():
            methods = gr.Dropdown(
                offered,
                value=[method for method in DEFAULT_METHODS if method in offered],
                multiselect=True,
                label="Methods",
                info="input_map is the recommended one",
                min_width=320,
            )
            target = gr.Textbox(
                label="Target (optional)",
                info='A token to explain, with its space: " Paris"',
                placeholder="the model's own prediction",
                min_width=320,
            )
        button = gr.Button("Map it", variant="primary")
        sentence = gr.Textbox(label="Answer", interactive=False, lines=1, max_lines=6)
        page = gr.HTML(elem_id="page")
        gr.Examples(EXAMPLES, prompt, label="Examples")
        with gr.Accordion("What do the methods show?", open=False):
            gr.Markdown("\n".join(f"- `{method}`: {registry.describe(method).line}" for method in offered))

        def respond(prompt: str, names: list[str], target: str) -> tuple[str, str]:
            return answer(workshop, prompt, target, names)

        gr.on(
            [button.click, prompt.submit, target.submit],
            *(respond, [prompt, methods, target], [sentence, page]),
            api_name="map",
            # A model is open in one thread at a time.
            concurrency_limit=1,
        )
    return app.queue(max_size=LIMITS.waiting)


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("LENS_MIX_MODEL", MODEL)
    build(load(given)).launch(theme=_THEME, css=_STYLE, js=_SCRIPT, show_error=True)
