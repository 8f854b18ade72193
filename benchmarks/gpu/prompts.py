"""Makes the file of prompts that the drafter of SmolLM2 was trained with, from texts at hand.

    python benchmarks/gpu/prompts.py --data DIR --answers own.jsonl.gz --german locale/ --out prompts.jsonl.gz

`--data` has gsm8k/train.jsonl, gutenberg/*.txt, peps/peps.jsonl, children_stories/stories.jsonl and
sgd_dialogues/train.jsonl. `--answers` are those of earlier runs, whose prompts are asked again. `--german` is a folder
of message catalogues (.po), to be translated. Nothing of the texts that a drafter is judged on belongs there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SUMMARISE = (
    *["Summarize: "] * 6,
    "Summarize the following text: ",
    "Summarize this in two sentences:\n\n",
    "TL;DR: ",
    "What is the main point of this text?\n\n",
)
ASK = (
    "who is {}?",
    "what happened to {}?",
    "where was {}?",
    "what is {}?",
    "when did {} appear?",
    "what did {} say?",
    "Who is {} and what does the text say about them?",
)
NAME = re.compile(r"(?<![.!?] )(?<!^)\b([A-Z][a-z]{2,}(?: [A-Z][a-z]+){0,2})\b")
SHORTEST, LONGEST = 500, 1500
"""Characters of a passage."""


def passages(text: str) -> Iterator[str]:
    """Pieces of a text at its paragraphs, without its first and last ones."""
    gathered = ""
    for paragraph in text.replace("\r\n", "\n").split("\n\n")[20:-40]:
        words = " ".join(paragraph.split())
        gathered = f"{gathered} {words}".strip() if len(words) >= 80 else gathered
        if len(gathered) > SHORTEST:
            end = gathered[:LONGEST].rfind(". ") if len(gathered) > LONGEST else len(gathered) - 1
            if end > SHORTEST:
                yield gathered[: end + 1]
            gathered = ""


def some(texts: Iterator[str], num: int, rng: random.Random) -> list[str]:
    """`num` passages of a text, or all."""
    found = list(texts)
    rng.shuffle(found)
    return found[:num]


def german(folder: Path) -> list[str]:
    """Sentences of message catalogues, without places for values and markup."""
    found = set()
    for path in folder.rglob("*.po"):
        for match in re.finditer(r'\nmsgstr(?:\[\d\])? ((?:"(?:[^"\\]|\\.)*"\s*)+)', path.read_text()):
            pieces = re.findall(r'"(?:[^"\\]|\\.)*"', match.group(1))
            text = " ".join("".join(json.loads(x) for x in pieces if "\\x" not in x).split())
            if not re.search(r"[%{}<>&]|\bhttp", text) and len(text.split()) >= 4 and len(text) <= 500:
                found.add(text)
    return sorted(found)


def records(path: Path) -> list[dict[str, Any]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.splitlines()]


def prompts(data: Path, answers: Sequence[Path], catalogues: Path | None, rng: random.Random) -> list[dict[str, Any]]:
    """All prompts, in a random order."""
    before = list(dict.fromkeys(record["prompt"] for path in answers for record in records(path)))
    known = "\n".join(before)
    maths = [x["question"] for x in records(data / "gsm8k" / "train.jsonl") if x["question"][:60] not in known]
    books = [x for path in sorted((data / "gutenberg").glob("*.txt")) for x in some(_of_book(path), 95, rng)]
    peps = [x for one in records(data / "peps" / "peps.jsonl") for x in some(passages(one["text"]), 4, rng)]
    stories = [
        x["text"][:LONGEST] for x in records(data / "children_stories" / "stories.jsonl") if len(x["text"]) > 300
    ]
    for texts in (books, peps):
        rng.shuffle(texts)
    asked = [f"Translate German to English: {x}" for x in (german(catalogues) if catalogues else ())]
    asked += maths + [rng.choice(SUMMARISE) + x for x in (*books[:3200], *peps[:1000], *stories)]
    for passage in (*books[3200:6200], *peps[1000:1700]):
        if names := NAME.findall(passage):
            asked.append(f"{passage}\n{rng.choice(ASK).format(rng.choice(names))}")
    found = [{"prompt": x} for x in before] + [{"turns": [["User", x]]} for x in asked]
    dialogues = records(data / "sgd_dialogues" / "train.jsonl")
    rng.shuffle(dialogues)
    for dialogue in dialogues[:1500]:
        turns = dialogue["turns"][: rng.choice((1, 3, 5, 7))]
        found.append({"turns": [["User" if who == "U" else "Assistant", said] for who, said in turns]})
    rng.shuffle(found)
    return found


def _of_book(path: Path) -> Iterator[str]:
    return passages(path.read_text(errors="ignore"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--answers", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--german", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    found = prompts(args.data, args.answers, args.german, random.Random(7))
    with gzip.open(args.out, "wt", compresslevel=9) as file:
        file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in found)
    print(f"{len(found):,} prompts, {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
