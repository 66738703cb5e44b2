"""Test the page where notebooks show it: in frames without an origin of their own, under strict policies."""

from __future__ import annotations

import json

import pytest

import lens_mix as lm
from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401
from tests.random_maps import map_of, random_attention
from tests.view.page.test_in_a_browser import all_of, clicked_until, rows_of, wait

pytestmark = NEEDS_CHROMIUM

# The policy of the frame in which VS Code shows the outputs of a notebook.
VS_CODE = (
    "default-src 'none'; script-src https://*.vscode-cdn.net 'unsafe-inline' 'unsafe-eval'; "
    "style-src https://*.vscode-cdn.net 'unsafe-inline'; img-src https: http: data:; font-src https:; "
    "connect-src https:; child-src https: data:"
)
NO_SCRIPT = "default-src 'none'; style-src 'unsafe-inline'"


@pytest.fixture(scope="module")
def m():
    return map_of(random_attention(heads=2))


def show(browser, tmp_path, policy, output):
    """Show an output in a sandboxed frame with this policy, and switch to the page in it."""
    start = f'<!DOCTYPE html><meta charset=utf-8><meta http-equiv=Content-Security-Policy content="{policy}">'
    (tmp_path / "webview.html").write_text(f"{start}<body>{output}", encoding="utf-8")
    frame = (
        '<iframe src="webview.html" sandbox="allow-scripts allow-downloads" width=1200 height=900></iframe>'
    )
    outer = tmp_path / "outer.html"
    outer.write_text(f"<!DOCTYPE html>{frame}")
    browser.get("about:blank")
    browser.get(f"file://{outer}")
    browser.switch_to.frame(browser.find_element("tag name", "iframe"))
    browser.switch_to.frame(browser.find_element("tag name", "iframe"))


def test_it_is_alive_under_the_policy_of_vs_code(browser, tmp_path, m):
    show(browser, tmp_path, VS_CODE, lm.page(m)._repr_html_())
    try:
        wait(browser, 0)
        clicked_until(browser, "#tokens [data-key='3']", "#tokens [data-key='3'].chosen")
        for row in rows_of(browser):
            expected = m.merge_heads().scores[int(row["layer"]), 3, int(row["key"])].item()
            assert float(row["value"] or 0) == pytest.approx(expected, abs=2e-3)
        clicked_until(browser, "#tab-grid", "canvas[data-grid=one]")
    finally:
        browser.switch_to.default_content()
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def test_it_says_so_if_scripts_are_forbidden(browser, tmp_path, m):
    show(browser, tmp_path, NO_SCRIPT, lm.page(m)._repr_html_())
    from selenium.webdriver.support.ui import WebDriverWait

    # A page that is still loading does not say so, so it takes three seconds.
    sentence = "script of this page did not run"
    assert sentence not in browser.find_element("id", "view").text
    WebDriverWait(browser, 20).until(lambda _: sentence in browser.find_element("id", "view").text)
    browser.switch_to.default_content()
    browser.get_log("browser")


def test_it_is_alive_in_a_notebook_exported_as_html(browser, tmp_path, m):
    nbconvert = pytest.importorskip("nbconvert", reason="no nbconvert: pip install nbconvert")
    nbformat = pytest.importorskip("nbformat", reason="no nbformat: pip install nbconvert")
    data = {"text/html": lm.page(m)._repr_html_(), "text/plain": "Page"}
    output = nbformat.v4.new_output("execute_result", data=data, execution_count=1)
    cell = nbformat.v4.new_code_cell("lm.page(m)", outputs=[output], execution_count=1)
    notebook = nbformat.reads(json.dumps(nbformat.v4.new_notebook(cells=[cell])), as_version=4)
    body, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    path = tmp_path / "notebook.html"
    path.write_text(body, encoding="utf-8")
    browser.get(f"file://{path}")
    (frame,) = [one for one in all_of(browser, "iframe") if one.get_attribute("srcdoc")]
    browser.switch_to.frame(frame)
    wait(browser, 0)
    clicked_until(browser, "#tokens [data-key='3']", "#tokens [data-key='3'].chosen")
    assert len(rows_of(browser)) == 4 * 6
    browser.switch_to.default_content()
    browser.get_log("browser")
