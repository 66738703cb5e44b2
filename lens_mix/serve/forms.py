"""Make the HTML of the form and of its small pages; all inserted text is escaped."""

from __future__ import annotations

import importlib.resources
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import NamedTuple

from lens_mix import registry
from lens_mix.view.page import digest


class Request(NamedTuple):
    """What the form sends.

    Attributes:
        text: The prompt.
        methods: The names of the methods.
        all_rows: Whether every method computes all rows.
        is_confirmed: Whether the user has seen the estimate of a long computation.
        form: The number of the form, by which a new prompt replaces the one before.
    """

    text: str = ""
    methods: tuple[str, ...] = ()
    all_rows: bool = False
    is_confirmed: bool = False
    form: str = ""

    @classmethod
    def read(cls, fields: Mapping[str, Sequence[str]]) -> Request:
        """Return the request of the form's fields, by their names."""
        return cls(
            fields.get("text", [""])[0],
            tuple(fields.get("method", [])),
            "all_rows" in fields,
            "confirmed" in fields,
            fields.get("form", [""])[0],
        )

    def hidden_fields(self) -> str:
        """Return the HTML of hidden fields that send the same request, and that it is confirmed."""
        fields = [("text", self.text), ("form", self.form), ("confirmed", "1")]
        fields += [("method", name) for name in self.methods]
        fields += [("all_rows", "1")] if self.all_rows else []
        return "".join(
            f'<input type="hidden" name="{name}" value="{escape(value)}">' for name, value in fields
        )


def _read_file(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


_STYLE, _FORM_SCRIPT, _BUSY_SCRIPT = (_read_file(name) for name in ("form.css", "form.js", "busy.js"))


def _make_policy(*scripts: str) -> str:
    """Return a Content-Security-Policy: only these scripts, and only the addresses of this server."""
    script = f"script-src {' '.join(repr(digest(each)) for each in scripts)}; " if scripts else ""
    return (
        f"default-src 'none'; {script}style-src '{digest(_STYLE)}'; connect-src 'self'; frame-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
    )


MESSAGE_POLICY, FORM_POLICY = _make_policy(), _make_policy(_FORM_SCRIPT)
BUSY_POLICY = _make_policy(_BUSY_SCRIPT)
# The policy of the page has only the rules that HTML cannot contain; the file itself contains a stricter one.
PAGE_POLICY = "sandbox allow-scripts allow-downloads; frame-ancestors 'self'; form-action 'none'"


def make_form(model: str, reasons: Mapping[str, str], picked: Collection[str], limits: str) -> str:
    """Return the form; the answer opens in the frame below it.

    The text `FORM` is in the place of the form's number.

    Args:
        model: The name of the model.
        reasons: For each method, in the order of the list, the reason why it cannot run on this model, or ""
            if it can.
        picked: The methods that are picked at first.
        limits: A sentence about the limits of a request.
    """
    groups: dict[str, list[str]] = {}
    for name in reasons:
        groups.setdefault(registry.describe(name).group, []).append(name)
    lists = [
        f"<fieldset><legend>{escape(group)}</legend>"
        f"{''.join(_make_checkbox(name, reasons[name], name in picked) for name in names)}</fieldset>"
        for group, names in groups.items()
    ]
    return _make_document(
        f"{model} · lens_mix",
        f"<header><h1>{escape(model)}</h1><span>lens_mix</span></header>"
        '<main><form method="post" action="/map" target="page">'
        f'<input type="hidden" name="form" value="{FORM}">'
        '<label for="text">Prompt</label>'
        '<textarea id="text" name="text" rows="2" required autofocus aria-describedby="limits" '
        'placeholder="The Eiffel Tower is in the city of"></textarea>'
        '<div class="actions"><button>Map it</button>'
        f'<span id="estimate" role="status"></span><small id="limits">{escape(limits)}</small></div>'
        '<details open><summary>Methods<span id="picked"></span></summary>'
        '<label class="rows"><input type="checkbox" name="all_rows" value="1"> <span>Every position with '
        "every method <small>Otherwise a method that costs forward passes for each position explains the "
        "last one only.</small></span></label>"
        f'<div class="groups">{"".join(lists)}</div></details></form>'
        '<iframe name="page" title="Answer" allow="fullscreen"></iframe></main>',
        _FORM_SCRIPT,
    )


FORM = "%%FORM%%"


def make_message(title: str, text: str, advice: str = "") -> str:
    """Return a page that shows what happened, and what to do."""
    paragraphs = "".join(f"<p>{escape(each)}</p>" for each in (text, advice) if each)
    return _make_document(
        "lens_mix",
        f'<main class="message"><div role="alert"><h1>{escape(title)}</h1>{paragraphs}</div></main>',
    )


def make_confirmation(title: str, text: str, advice: str, request: Request) -> str:
    """Return a page that asks whether to start a long computation."""
    return _make_document(
        "lens_mix",
        f'<main class="message"><div role="alert"><h1>{escape(title)}</h1><p>{escape(text)}</p>'
        f"<p>{escape(advice)}</p></div>"
        f'<form method="post" action="/map">{request.hidden_fields()}<button>Start</button></form></main>',
    )


def make_busy(job: str, state: str, request: Request) -> str:
    """Return the page that is shown while a prompt waits or is computed.

    With JavaScript it shows the seconds as they pass; without, the browser loads it again every two seconds.

    Args:
        job: The name of the job, as in its address.
        state: What the job does, as `make_state` writes it.
        request: What was asked for.
    """
    return _make_document(
        "Computing · lens_mix",
        '<main class="message"><h1>Computing</h1><progress aria-label="Computing"></progress>'
        f'<p id="state" role="timer">{escape(state)}</p><p id="spoken" role="status"></p>'
        f"<p>{escape(', '.join(request.methods))}</p><blockquote>{escape(request.text)}</blockquote>"
        f'<form method="post" action="/cancel/{escape(job)}"><button>Cancel</button></form></main>',
        _BUSY_SCRIPT,
        head='<noscript><meta http-equiv="refresh" content="2"></noscript>',
    )


def _make_checkbox(name: str, reason: str, is_picked: bool) -> str:
    described = registry.describe(name)
    state = " disabled" if reason else " checked" if is_picked else ""
    style = ' class="unsupported"' if reason else ""
    details = f"{escape(described.line)} <i>{escape(described.cost_in_words)}</i>"
    if reason:
        details = f"Not on this model: {escape(reason)}"
    return (
        f'<label{style}><input type="checkbox" name="method" value="{escape(name)}"{state}> '
        f"<span>{escape(name)}<small>{details}</small></span></label>"
    )


def _make_document(title: str, body: str, script: str = "", head: str = "") -> str:
    code = f"<script>{script}</script>" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>{head}</head><body>{body}{code}</body></html>\n"
    )
