"""Writes a text as states over bytes. `grammar.py` runs this file in a process of its own.

No regular expression tells how long that takes or how much memory it needs: a short one can have millions of states.
So the process has a limit of both, and whoever asked goes on. It imports nothing of hsd_jax.
"""

import json
import marshal
import sys

MOST_BYTES, MOST_STATES = 2 << 30, 1 << 14
END = "\U0010ffff"
"""Stands behind each text. outlines-core 0.2.14 leaves out texts that begin with another one and go on for two bytes or
more ("yesterday" of yes|yesterday); behind this character, which is none, no text is the beginning of another."""


def main() -> None:
    """Reads {"regex": ...} or {"schema": ...} as JSON. Writes the first state, those behind END and all moves."""
    asked = json.load(sys.stdin)
    from outlines_core import Index, Vocabulary, json_schema

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    except ImportError:  # not on Windows
        pass
    bytes_alone = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    regex = asked["regex"] if "regex" in asked else json_schema.build_regex_from_schema(asked["schema"])
    if ")" in asked.get("regex", ""):
        Index(regex + END, bytes_alone)  # an error, if it has a bracket that those below would match
    index = Index(f"(?:{regex}){END}", bytes_alone)
    found = index.get_initial_state(), list(index.get_final_states()), index.get_transitions()
    if len(found[2]) > MOST_STATES:
        sys.exit(f"it has {len(found[2])} states; at most {MOST_STATES}")
    sys.stdout.buffer.write(marshal.dumps(found))


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.exit(" ".join(f"{error}".split()) or type(error).__name__)
