"""Files of methods that have a name (`hsd bench --methods NAME`)."""

from pathlib import Path

PRESETS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
