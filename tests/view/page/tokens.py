"""List tokens that would break a page that treats them as markup."""

NASTY = (
    "<bos>",
    "</script>",
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "%%SCRIPT%%",
    "&lt;b&gt;",
    "\u2028",
    "\x00\x07\x1b",
    "مرحبا",
    "e\u0301\u0323\u0489",
    "👩🏽‍🚀",
    "\ud83d",
    "\u202eabc",
    "\n",
    '"; window.hacked = 1; "',
    "日本語",
)
