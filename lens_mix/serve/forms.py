"""The HTML around the page: the form, and messages. Whatever is put in is escaped."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from html import escape

from lens_mix.view.page import digest

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif; }
* { box-sizing: border-box; }
body { margin: 0; padding: 12px; height: 100vh; display: flex; flex-direction: column; }
h1 { font-size: 1rem; margin: 0 0 8px; }
form { display: grid; gap: 8px; }
textarea { font: inherit; width: 100%; }
fieldset { display: flex; flex-wrap: wrap; gap: 2px 14px; border: 1px solid #8888; }
.refused { opacity: 0.5; }
iframe { flex: 1; min-height: 480px; border: 0; margin-top: 8px; }
.message { max-width: 60em; overflow-wrap: anywhere; white-space: pre-wrap; }
"""

# Of the form and of messages: no script at all, no address but this server's own.
POLICY = (
    f"default-src 'none'; style-src '{digest(_STYLE)}'; frame-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'self'"
)
# Of the page: what an element in the file can't say; its own policy, a stricter one, stands in the file.
PAGE_POLICY = "sandbox allow-scripts allow-downloads; frame-ancestors 'self'; form-action 'none'"


def form(model: str, refusals: Mapping[str, str], picked: Collection[str], limits: str) -> str:
    """The form; what it asks for opens in the frame below it.

    `refusals` say of each method why it can't run on this model, or ""; some are picked to begin with.
    """
    boxes = [_checkbox(name, refusal, name in picked) for name, refusal in refusals.items()]
    return _document(
        f"lens_mix: {model}",
        f"<h1>{escape(model)}</h1>"
        '<form method="post" action="/map" target="page">'
        '<label>Sentence <textarea name="text" rows="2" required autofocus></textarea></label>'
        f"<fieldset><legend>Methods</legend>{''.join(boxes)}</fieldset>"
        f"<div><button>Map it</button> <small>{escape(limits)}</small></div></form>"
        '<iframe name="page" title="The page" sandbox="allow-scripts allow-downloads" '
        'allow="fullscreen"></iframe>',
    )


def message(words: str) -> str:
    """A page that says something."""
    return _document("lens_mix", f'<p class="message" role="alert">{escape(words)}</p>')


def _checkbox(name: str, refusal: str, picked: bool) -> str:
    state = " disabled" if refusal else " checked" if picked else ""
    look = f' class="refused" title="{escape(refusal)}"' if refusal else ""
    name = escape(name)
    return f'<label{look}><input type="checkbox" name="method" value="{name}"{state}> {name}</label>'


def _document(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )
