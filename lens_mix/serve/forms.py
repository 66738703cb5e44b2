"""Make the HTML of the form and of messages; all inserted text is escaped."""

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
.unsupported { opacity: 0.5; }
iframe { flex: 1; min-height: 480px; border: 0; margin-top: 8px; }
.message { max-width: 60em; overflow-wrap: anywhere; white-space: pre-wrap; }
"""

# The policy of the form and of messages allows no scripts, and no addresses other than this server's own.
POLICY = (
    f"default-src 'none'; style-src '{digest(_STYLE)}'; frame-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'self'"
)
# The policy of the page has only the rules that HTML cannot contain; the file itself contains a stricter one.
PAGE_POLICY = "sandbox allow-scripts allow-downloads; frame-ancestors 'self'; form-action 'none'"


def make_form(model: str, reasons: Mapping[str, str], picked: Collection[str], limits: str) -> str:
    """Return the form; the answer opens in the frame below it.

    Args:
        model: The name of the model.
        reasons: For each method the reason why it cannot run on this model, or "" if it can.
        picked: The methods that are picked at first.
        limits: a sentence about the limits of a request.
    """
    boxes = [_make_checkbox(name, reason, name in picked) for name, reason in reasons.items()]
    return _make_document(
        f"lens_mix: {model}",
        f"<h1>{escape(model)}</h1>"
        '<form method="post" action="/map" target="page">'
        '<label>Sentence <textarea name="text" rows="2" required autofocus></textarea></label>'
        f"<fieldset><legend>Methods</legend>{''.join(boxes)}</fieldset>"
        f"<div><button>Map it</button> <small>{escape(limits)}</small></div></form>"
        '<iframe name="page" title="The page" sandbox="allow-scripts allow-downloads" '
        'allow="fullscreen"></iframe>',
    )


def make_message(text: str) -> str:
    """Return a page that shows one message."""
    return _make_document("lens_mix", f'<p class="message" role="alert">{escape(text)}</p>')


def _make_checkbox(name: str, reason: str, is_picked: bool) -> str:
    state = " disabled" if reason else " checked" if is_picked else ""
    attributes = f' class="unsupported" title="{escape(reason)}"' if reason else ""
    name = escape(name)
    return f'<label{attributes}><input type="checkbox" name="method" value="{name}"{state}> {name}</label>'


def _make_document(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )
