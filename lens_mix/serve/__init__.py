"""`lens-mix serve`: type a sentence, pick methods, get the page; on this machine alone.

One model, loaded once. The standard library's server answers in threads of its own and asks the main thread,
which computes for one request at a time (`desk`), so that Ctrl-C and the time limit stop it cleanly.
"""

from lens_mix.serve.site import Limits, Site

__all__ = ["Limits", "Site"]
