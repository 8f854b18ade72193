"""Writes the page of `hsd show` as an image. The library plutoprint (extra `picture`) draws the HTML of `html.py`."""

from __future__ import annotations

import io
from pathlib import Path

from hsd_jax.host.files import replacing
from hsd_jax.lab.viz import html
from hsd_jax.lab.viz.page import Page

WIDTH, MARGIN = 1200, 56
"""Width and margin of the image in CSS pixels. A tree that is wider with its margins makes the image wider."""
MAX_HEIGHT = 20000
"""Largest height in CSS pixels, because the library draws at most 32,767 pixels."""
PIXELS = 1.6
"""Pixels of the image per CSS pixel."""
FACES = {"DejaVuSans": "DejaVu Sans", "DejaVuSansMono": "DejaVu Sans Mono"}
"""Fonts of matplotlib by their files. They are used because a machine without a screen may have no fonts."""


def write(page: Page, path: Path) -> None:
    """Writes the image.

    Raises:
      ValueError: if it would be too tall.
      OSError: if it cannot be written. No part of the file stays.
    """
    import plutoprint as pluto  # pyright: ignore[reportMissingImports]

    width = max([WIDTH, *(drawing.width + 2 * MARGIN for drawing in page.drawings)])
    size = pluto.PageSize(width * pluto.UNITS_PX, WIDTH * pluto.UNITS_PX)  # in points; the height follows from the text
    book = pluto.Book(size, pluto.PAGE_MARGINS_NONE, pluto.MEDIA_TYPE_SCREEN)
    book.load_html(html.render(page), user_style=_style(), base_url="about:blank")
    height = book.get_document_height()
    if height > MAX_HEIGHT:
        raise ValueError(
            f"--out {path}: these trees and this text would make an image of {height:,.0f} pixels; lower --max-rounds"
            f" or --max-new-tokens (at most {MAX_HEIGHT:,}), or write .html"
        )
    image = io.BytesIO()
    book.write_to_png_stream(image, width=round(PIXELS * width))
    with replacing(path) as temporary:
        temporary.write_bytes(image.getvalue())


def _style() -> str:
    """CSS that makes the page as wide as the image and uses the fonts of matplotlib."""
    import matplotlib

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    faces = "".join(
        f'@font-face {{ font-family: "{face}"; src: url("{(folder / name).as_uri()}.ttf"); }}'
        for name, face in FACES.items()
    )
    return faces + f'body {{ max-width: none; font-family: "{FACES["DejaVuSans"]}"; }}'
