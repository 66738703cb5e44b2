"""Make the app of `lens-mix serve` and of the Hugging Face Space: a prompt or documents in, a page out.

It needs the extra `serve` (gradio), which queues the requests, shows the progress and has an API. The page is
that of `lm.page` or `Trace.show`, in a frame that opens no connection.
"""

from __future__ import annotations

import contextlib
import functools
import html
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# gradio reads this variable when it is imported.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

try:
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
except ImportError as problem:
    raise ImportError("the app needs gradio: pip install 'lens_mix[serve]'") from problem

from lens_mix import registry, report, supported_methods
from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError, model_class_of
from lens_mix._classes.model_names import strip_path
from lens_mix._inputs.features import require_tokens
from lens_mix._inputs.prompts import is_causal_model, is_encoder_decoder
from lens_mix.maps import MixingMap
from lens_mix.named_maps import DEFAULT_METHODS, INPUT_MAP, compute_maps
from lens_mix.recommended import recommended_method
from lens_mix.session import Session
from lens_mix.traces.audit import PASSES_PER_CLAIM, audit_in_steps
from lens_mix.traces.documents import Documents
from lens_mix.traces.reading import add_answer, read_prompt_alone, read_prompt_text
from lens_mix.traces.trace import trace
from lens_mix.view.page import Page, page

# The function of a tab: it returns what is shown as HTML and as text, first while it computes.
_Results = Callable[..., Iterator[tuple[str, str]]]

_LOCALHOST = "127.0.0.1"
_WRITTEN = 64  # the most tokens that the model writes about documents
_SOURCES = 5  # the number of sources that the text lists for each sentence
_WAITING = 16  # the most requests that wait
# gradio starts the next request when one is cancelled, before the thread of that one has ended.
_ONE_AT_A_TIME = threading.Lock()

_PROMPTS = (
    "The Eiffel Tower is in the city of",
    "My grandmother was born in Italy. She left the country with her three children after the war, "
    "but all her life she cooked the food of her home and sang to us in",
    "The keys to the old wooden cabinet that stands in the hall",
)
# There is a field for each of these documents.
_TEXTS = (
    "Northwind Power was founded in Bergen in 1998. It trained its forecasting model on eight P100 GPUs.",
    "The company opened an office in Oslo in May. It has 412 employees.",
    "",
)
_QUESTION = "What was the forecasting model trained on?"

_STYLE = """
.page, .page * { padding: 0 !important }
.page iframe { display: block; width: 100%; height: 85vh; border: 0; outline: 1px solid #8886 }
.gradio-container > .main {
  width: 100%; max-width: 1200px !important;
  margin: 0 auto !important; padding: 16px clamp(12px, 3vw, 32px) !important;
}
.methods .wrap { flex-direction: column }
"""
# The page in a frame reports its height. A frame that is as high needs no scroll bar of its own.
_SCRIPT = """() => addEventListener("message", event => {
  for (const frame of document.querySelectorAll(".page iframe"))
    if (event.source === frame.contentWindow && event.data && event.data.lensMixHeight)
      frame.style.height = Math.min(event.data.lensMixHeight, 5000) + "px"
})"""
# The web fonts of gradio's themes would be fetched from another server.
_THEME = gr.themes.Default(
    primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
).set(
    # Its own small text and main button have too little contrast to be read by everybody.
    body_text_color_subdued="*neutral_600",
    body_text_color_subdued_dark="*neutral_300",
    button_primary_background_fill="*primary_600",
    button_primary_background_fill_hover="*primary_700",
    block_info_text_color="*neutral_600",
    block_info_text_color_dark="*neutral_300",
    input_placeholder_color="*neutral_500",
    input_placeholder_color_dark="*neutral_400",
)


def launch(
    model: TransformerLensModel,
    *,
    map_tokens: int = 128,
    trace_tokens: int = 512,
    server_name: str | None = _LOCALHOST,
    port: int | None = None,
) -> tuple[Any, str]:
    """Start the app of a model, and return it with its address; `block_thread()` of it waits for Ctrl-C.

    Args:
        model: Any TransformerLens model that reads text.
        map_tokens: The largest number of tokens of a prompt.
        trace_tokens: The largest number of tokens of documents, question and given answer together.
        server_name: The address to listen on. None: that of gradio, which listens to all in a Space.
        port: The port. None: the first free one from 7860 on, or that in GRADIO_SERVER_PORT.

    Raises:
        OSError: The port is in use, or may not be used.
        ValueError: If the model reads no text.
    """
    app = _build(model, map_tokens, trace_tokens)
    name = server_name or os.environ.get("GRADIO_SERVER_NAME", _LOCALHOST)
    # A request for another host name comes from a foreign page whose name was bound to this machine.
    hosts = [_LOCALHOST, "localhost"] if name in (_LOCALHOST, "localhost") else ["*"]
    _, url, _ = app.launch(
        server_name=name,
        server_port=port,
        app_kwargs={"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]},
        share=False,
        ssr_mode=False,
        mcp_server=False,
        # With it, prompts and pages would stay in the browser's storage.
        run_history=False,
        footer_links=["api"],
        theme=_THEME,
        css=_STYLE,
        js=_SCRIPT,
        quiet=True,
        prevent_thread_lock=True,
    )
    return app, url


def _build(model: TransformerLensModel, map_tokens: int, trace_tokens: int) -> Any:
    """Return the gradio app of a model, with a tab for maps and, if the model writes text, one for traces."""
    require_tokens(model, "model")
    table = supported_methods.support(model)
    name = strip_path(table.model)
    model_class = model_class_of(model)
    with gr.Blocks(title=f"{name} · lens_mix", analytics_enabled=False) as app:
        gr.Markdown(f"# Which tokens did a prediction come from?\nThe model is {name}.")
        with gr.Tab("Map"):
            _make_map_tab(model, {name: reason for name, _, reason in table}, map_tokens)
        if is_causal_model(model, model_class) or is_encoder_decoder(model, model_class):
            with gr.Tab("Trace"):
                _make_trace_tab(model, trace_tokens)
    return app.queue(max_size=_WAITING)


def _make_map_tab(model: TransformerLensModel, reasons: Mapping[str, str], limit: int) -> None:
    """Add the fields for a prompt, and the page of its maps.

    Args:
        model: The model.
        reasons: For each method, the reason why it cannot run on the model, or "" if it can.
        limit: The largest number of tokens of a prompt.
    """
    first = []
    # The recommended map of an encoder-decoder needs a text of the decoder too, as a trace has it.
    if not is_encoder_decoder(model, model_class_of(model)):
        with contextlib.suppress(UnsupportedModelError):
            recommended_method(model)
            first = [INPUT_MAP]
    ordered = [name for name in registry.list_names() if name in reasons]
    offered = [name for name in ordered if not reasons[name]]

    prompt = gr.Textbox(
        _PROMPTS[0], label="Prompt", info=f"At most {limit} tokens", lines=2, max_lines=8, elem_id="prompt"
    )
    gr.Examples(list(_PROMPTS), prompt, label="Examples")
    target = gr.Textbox(
        label="Target (optional)",
        info="The token to explain, such as Paris. Methods without a target ignore it.",
        placeholder="what the model predicts itself",
    )
    with gr.Accordion("Methods beside the recommended map" if first else "Methods", open=not first):
        other_methods = gr.CheckboxGroup(
            [(_describe(name), name) for name in offered],
            value=[name for name in DEFAULT_METHODS if name in offered],
            label="Methods",
            show_label=False,
            elem_classes="methods",
        )
        all_positions = gr.Checkbox(
            False,
            label="All positions",
            info="Otherwise, methods that take passes for each position explain only one: the last, or that "
            "of [CLS] or the only mask",
        )
        if len(offered) < len(ordered):
            with gr.Accordion("Methods that cannot run on this model", open=False):
                gr.Markdown("\n".join(f"- `{name}`: {reasons[name]}" for name in ordered if reasons[name]))

    def make_maps(
        prompt: str, target: str, other_methods: list[str], all_positions: bool
    ) -> Iterator[tuple[str, str]]:
        if not prompt.strip():
            raise ValueError("The prompt is empty. Type a text.")
        _check_length("The prompt", len(Session(model, {}).read(prompt).tokens), limit)
        maps: dict[str, MixingMap] = {}
        names = [*first, *other_methods]
        for number, name in enumerate(names, 1):
            yield _busy(f"{name}: map {number} of {len(names)}")
            maps |= compute_maps(
                model, prompt, [name], target=target or None, all_rows=all_positions, progress=None
            )
        if not maps:
            raise ValueError("No method is chosen. Choose one or several.")
        yield _frame(page(maps)), report.describe_maps(maps, every_row=False)

    _add_result(
        "Show the map", "map", make_maps, [prompt, target, other_methods, all_positions], [prompt, target]
    )


def _describe(name: str) -> str:
    """Return the name of a method, what its map means and what it costs."""
    described = registry.describe(name)
    return f"{name}: {described.line} ({described.cost_in_words})"


def _make_trace_tab(model: TransformerLensModel, limit: int) -> None:
    """Add the fields for documents, a question and an answer, and the page of the trace."""
    with gr.Row():
        documents = [
            gr.Textbox(
                text,
                label=f"Document {number}" + " (optional)" * (number > 1),
                lines=4,
                max_lines=12,
                min_width=280,
            )
            for number, text in enumerate(_TEXTS, 1)
        ]
    question = gr.Textbox(
        _QUESTION,
        label="Question",
        info=f"At most {limit} tokens with the documents and the answer",
    )
    answer = gr.Textbox(
        label="Answer (optional)", placeholder=f"what the model writes, at most {_WRITTEN} tokens", lines=2
    )
    is_measured = gr.Checkbox(
        False,
        label="Measure what each sentence of the answer loses without its strongest sources",
        info=f"One forward pass for each source, {_SOURCES} for each sentence",
    )
    is_audited = gr.Checkbox(
        False,
        label="Audit each sentence of the answer: what it rests on, or whether it is from memory",
        info=f"At most {PASSES_PER_CLAIM} forward passes for each sentence",
    )

    def make_trace(
        document_1: str,
        document_2: str,
        document_3: str,
        question: str,
        answer: str,
        is_measured: bool,
        is_audited: bool,
    ) -> Iterator[tuple[str, str]]:
        texts = {"document 1": document_1, "document 2": document_2, "document 3": document_3}
        given = {name: text.strip() for name, text in texts.items() if text.strip()}
        if not given:
            raise ValueError("All documents are empty. Type or paste a text.")
        prompt, written = Documents(given, question.strip()), answer if answer.strip() else None
        _check_length("The text", _count_tokens(model, prompt, written), limit)
        yield _busy("the model reads the answer" if written else "the model writes the answer")
        length = None if written else _WRITTEN
        traced = trace(model, prompt, answer=written, generate=length, progress=None)
        for number, span in enumerate(traced.spans if is_measured else [], 1):
            yield _busy(f"sentence {number} of {len(traced.spans)} without its sources")
            span.verify(_SOURCES)
        for found in audit_in_steps(traced) if is_audited else []:
            if len(found) < len(traced.spans):
                yield _busy(f"audit of sentence {len(found) + 1} of {len(traced.spans)}")
        yield _busy("the sources of each sentence")
        text = report.describe_trace(traced, traced.spans, _SOURCES)
        if traced.computed_audit is not None:
            text = f"{text}\n\n{report.describe_verdicts(traced.computed_audit)}"
        yield _frame(traced.show()), text

    fields = [*documents, question, answer, is_measured, is_audited]
    _add_result("Trace the answer", "trace", make_trace, fields, [question])


def _count_tokens(model: TransformerLensModel, prompt: Documents, answer: str | None) -> int:
    """Return the number of tokens of documents and question, and of an answer that is given."""
    text = read_prompt_text(model, prompt, {})
    alone = read_prompt_alone(model, prompt, text, None)
    return len(alone.tokens if answer is None else add_answer(model, alone, text, answer).tokens)


def _add_result(
    label: str, api_name: str, function: _Results, fields: Sequence[Any], submitting: Sequence[Any]
) -> None:
    """Add the buttons of a tab, the page that a function makes, and the same result as text."""
    with gr.Row():
        start = gr.Button(label, variant="primary", scale=3, min_width=200)
        cancel = gr.Button("Cancel", scale=1, min_width=100)
    shown = gr.HTML(elem_classes="page", padding=False)
    with gr.Accordion("The result as text", open=False):
        text = gr.Textbox(show_label=False, lines=3, max_lines=30, buttons=["copy"])
    run = gr.on(
        [start.click, *(field.submit for field in submitting)],
        _with_errors_as_sentences(function),
        fields,
        [shown, text],
        api_name=api_name,
        concurrency_id="model",
        concurrency_limit=1,
    )
    cancel.click(lambda: ("Cancelled.", ""), outputs=[shown, text], cancels=run, api_name=False, queue=False)


def _check_length(what: str, count: int, limit: int) -> None:
    """Raise a ValueError if a text has more tokens than the app takes."""
    if count > limit:
        raise ValueError(f"{what} has {count} tokens, and the limit is {limit}. Shorten it.")


def _busy(what: str) -> tuple[str, str]:
    """Return what is shown meanwhile; gradio can cancel a request whenever its function yields this."""
    return f'<p role="status">Computing: {html.escape(what)}</p>', ""


def _frame(made: Page) -> str:
    """Return the HTML of a frame with the page, which can neither read this site nor open a connection."""
    return (
        f'<iframe title="{html.escape(made.title)}" srcdoc="{html.escape(made.html)}" '
        'sandbox="allow-scripts allow-downloads" allow="fullscreen"></iframe>'
    )


def _with_errors_as_sentences(function: _Results) -> _Results:
    """Return the function with errors that gradio shows as a message.

    The traceback of an unexpected error is in the terminal, and with LENS_MIX_DEBUG=1 that of every error.
    """

    @functools.wraps(function)
    def make_results(*values: Any) -> Iterator[tuple[str, str]]:
        steps = function(*values)
        try:
            while True:
                with _ONE_AT_A_TIME:
                    step = next(steps, None)
                if step is None:
                    return
                yield step
        except Exception as problem:
            # What was shown meanwhile would stay below the message.
            yield "", ""
            is_expected = isinstance(problem, (ValueError, TypeError, UnsupportedModelError))
            text = str(problem) if is_expected else f"{type(problem).__name__}: {problem}"
            # gradio reads the message as HTML, and tokens such as <s> are none. It stays until it is closed.
            message = html.escape(text, quote=False)
            is_printed = not is_expected or bool(os.environ.get("LENS_MIX_DEBUG"))
            raise gr.Error(message, duration=None, print_exception=is_printed) from problem

    return make_results
