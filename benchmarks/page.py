"""Measure how fast the page of a long prompt is drawn in a browser: 300 tokens, 30 layers of 9 heads.

    python -m benchmarks.page                 the three figures, each the median of five
    python -m benchmarks.page --tokens 500    a longer prompt

It needs Chromium with its driver (Debian: chromium, chromium-driver) and selenium. A figure ends when the
browser has drawn the frame after the change.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import lens_mix as lm

VIEWS = ("text", "grid", "flow", "methods", "layers")
KEYS = ("ArrowLeft", "ArrowUp", "ArrowRight", "ArrowDown", "h")
# This script records when the page was drawn: the page counts its drawings in `data-ready`, and the browser
# draws its next frame after that.
RECORD = """
window.drawings = [];
new MutationObserver(() => {
  const ready = document.body && document.body.dataset.ready;
  if (!ready || ready === window.lastReady) return;
  window.lastReady = ready;
  requestAnimationFrame(() => { const channel = new MessageChannel();
    channel.port1.onmessage = () => window.drawings.push(performance.now()); channel.port2.postMessage(0); });
}).observe(document, { subtree: true, childList: true, attributes: true, attributeFilter: ["data-ready"] });
"""
FIRST = """
const done = arguments[0], wait = () => drawings.length ? done(drawings[0]) : setTimeout(wait, 1);
wait();
"""
CHANGE = """
const [key, value, done] = arguments, count = window.drawings.length, start = performance.now();
if (key === "key") document.body.dispatchEvent(new KeyboardEvent("keydown", { key: value, bubbles: true }));
else document.querySelector(`[data-view=${value}]`).click();
const wait = () => drawings.length > count ? done(drawings[count] - start) : setTimeout(wait, 1);
wait();
"""


def make_maps(tokens: int = 300, layers: int = 30, heads: int = 9) -> dict[str, lm.MixingMap]:
    """Return attention weights with heads, and a second map without them, of random numbers."""
    generator = torch.Generator().manual_seed(0)
    later = ~torch.ones(tokens, tokens, dtype=torch.bool).tril()
    names = [f" t{position}" for position in range(tokens)]
    maps = {}
    for method, shape in (("attention", (layers, heads)), ("value_zeroing", (layers,))):
        logits = 3 * torch.randn(*shape, tokens, tokens, generator=generator)
        scores = logits.masked_fill(later, -torch.inf).softmax(-1)
        maps[method] = lm.MixingMap(scores=scores, tokens=names, method=method, causal=True)
    return maps


def start_browser() -> Any:
    """Return a browser without a window."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1300,900"):
        options.add_argument(f"--{argument}")
    return webdriver.Chrome(service=webdriver.ChromeService(shutil.which("chromedriver")), options=options)


def measure(browser: Any, path: Path, repeats: int = 5) -> dict[str, float]:
    """Return the seconds to the first drawing, and for each view and key until it is drawn: medians.

    The first drawing is counted from the start of the navigation, the others from the event. The first event
    comes a second after the first drawing.
    """
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": RECORD})
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        browser.get("about:blank")
        browser.get(f"file://{path}")
        times.setdefault("first paint", []).append(browser.execute_async_script(FIRST))
        # The page reads the numbers of all heads after it was drawn, and a reader looks before the first key.
        time.sleep(1)
        for view in VIEWS:
            times.setdefault(f"view {view}", []).append(browser.execute_async_script(CHANGE, "view", view))
            for key in KEYS:
                name = f"key {key} in {view}"
                times.setdefault(name, []).append(browser.execute_async_script(CHANGE, "key", key))
    return {name: statistics.median(found) / 1000 for name, found in times.items()}


def main() -> None:
    """Print the three figures, and what each view and key took."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--tokens", type=int, default=300)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        lm.page(make_maps(given.tokens), path)
        browser = start_browser()
        try:
            found = measure(browser, path)
        finally:
            browser.quit()
        size = path.stat().st_size / 1e6
    print(f"{given.tokens} tokens, 30 layers of 9 heads and a map without heads: {size:.1f} MB")
    for name, seconds in found.items():
        print(f"  {name:<28} {seconds:.3f} s")
    for kind in ("first paint", "view", "key"):
        print(f"{kind}: at most {max(value for name, value in found.items() if name.startswith(kind)):.3f} s")


if __name__ == "__main__":
    main()
