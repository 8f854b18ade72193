"""The prompts of the bundled demo: a dozen, written by hand in the style of its data, in no training file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

PROMPTS = Path(__file__).parent / "assets" / "demo_prompts.jsonl"


@dataclasses.dataclass(frozen=True)
class DemoPrompt:
    """One prompt of the demo."""

    name: str
    text: str


def read_prompts() -> list[DemoPrompt]:
    """All demo prompts: eight dialogues open for the assistant, four maths problems open for the answer.

    Raises:
      FileNotFoundError: if the installation is incomplete.
    """
    if not PROMPTS.is_file():
        raise FileNotFoundError(f"{PROMPTS}: missing from this installation; reinstall hsd_jax")
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    return [DemoPrompt(**json.loads(line)) for line in lines if line.strip()]
