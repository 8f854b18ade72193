"""For the site: our docstrings put no empty line before `Raises:` and the like, and the parser wants one there."""

import re

import griffe

SECTION = re.compile(r"(?<!\n)\n(?=(Args|Returns|Raises|References):\n)")


class Sections(griffe.Extension):
    """Parts the sections of every docstring by an empty line before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Called once for everything that was read."""
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub("\n\n", obj.docstring.value)
