"""Serve a form on this machine only: a user enters a prompt, picks methods and gets the page.

The model is loaded once. The standard library's server answers each request in a thread of its own. The maps
are computed in the main thread, for one request at a time (`job_queue`). There Ctrl-C, the cancel button and
the time limit can stop a computation and leave the model unchanged.
"""

from lens_mix.serve.answers import Limits
from lens_mix.serve.site import Site

__all__ = ["Limits", "Site"]
