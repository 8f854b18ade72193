"""Writes the target's own responses as training data: a plan of seeded jobs, and a file that a later run can resume.

Every row has its own temperature and seed, which depend only on the number of its prompt. Rows come and go in the slots
of one session, and the plan fixes the order of their lines. So an interrupted run ends with the same file as another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hsd_jax.config import TreeConfig
from hsd_jax.host import lock
from hsd_jax.host.files import write_json
from hsd_jax.measure import texts
from hsd_jax.models.checkpoint import Source, find
from hsd_jax.pair import Params
from hsd_jax.session import MOST_SLOTS
from hsd_jax.train import data, manifest
from hsd_jax.train.journal import ProgressReport, Report
from hsd_jax.train.records import check_file
from hsd_jax.train.response_prompts import TEXT, GenerateConfig, Prompt, draw, read_prompts
from hsd_jax.train.rows import spoken


@dataclasses.dataclass(frozen=True)
class ResponseJob:
    """One row to decode."""

    prompt: Prompt
    temperature: float
    seed: int


def make_plan(prompts: Sequence[Prompt], config: GenerateConfig) -> list[ResponseJob]:
    """The jobs of a run, in the order of its lines.

    Jobs are grouped by the length of their prompts, `config.batch` jobs in a group, and the groups are in a random
    order. So the file is a fair sample at any time, and the remaining time can be estimated. The order must stay the
    same in all versions, because they must be able to continue each other's files.
    """
    jobs = []
    for number, prompt in enumerate(prompts):
        first = [config.temperatures[i] for i in draw(config.seed, number, 0).permutation(len(config.temperatures))]
        again = [t for t in first if t > 0]  # the greedy answer is the same every time
        for sample in range(config.samples_per_prompt):
            temperature = first[sample] if sample < len(first) else again[(sample - len(first)) % len(again)]
            seed = int(draw(config.seed, number, 1 + sample).integers(2**32))
            jobs.append(ResponseJob(prompt, temperature, seed))
    jobs.sort(key=lambda job: len(job.prompt.tokens))  # stable
    groups = [jobs[i : i + config.batch] for i in range(0, len(jobs), config.batch)]
    return [job for i in draw(config.seed, len(groups)).permutation(len(groups)) for job in groups[i]]


def settings_path(out: str | Path) -> Path:
    """The file with the settings of a run, beside its result."""
    return Path(f"{out}.settings.json")


def check_settings(out: str | Path, settings: dict[str, Any]) -> None:
    """Refuses to continue a result that was made with other settings. `settings` may be some of them."""
    out = Path(out)
    if out.suffix != ".jsonl":
        raise ValueError(f"{out}: expected a name that ends in .jsonl")
    if out.exists():  # if no line was written, stored settings do not matter
        usual = dataclasses.asdict(GenerateConfig())
        what = f"{out} was started with other settings (go on with those, or choose another --out)"
        manifest.check_claim(settings_path(out), settings, what, usual=usual)


def lines_done(out: Path, jobs: Sequence[ResponseJob]) -> int:
    """The number of complete lines of an unfinished result. Removes an incomplete last line from the file."""
    if not out.is_file():
        return 0
    content = out.read_bytes()
    os.truncate(out, content.rfind(b"\n") + 1)
    lines = content.split(b"\n")[:-1]
    wanted = [(job.prompt.source, job.seed) for job in jobs[: len(lines)]]
    if [(line.get("source"), line.get("seed")) for line in map(json.loads, lines)] != wanted:
        raise ValueError(f"{out}: holds other lines than those of this run; choose another name")
    return len(lines)


def run(
    files: Sequence[str | Path],
    out: Path,
    source: Source,
    config: GenerateConfig,
    settings: dict[str, Any],
    load: Callable[[], tuple[Params, TreeConfig | None]],
    report: Report,
    skip: Report | None = None,
) -> int:
    """Reads the prompts, checks the settings, then loads the target and writes its responses. Returns their number.

    Args:
      settings: other settings that the text depends on and that are known before weights are read: precision, mesh,
        max_len.
      load: returns the models and the tree of their drafter, or None for plain decoding.
    """
    for path in files:
        check_file(path)
    with lock.held(out.parent, f".{out.name}{lock.NAME}"):
        settings = dataclasses.asdict(config) | {"prompts": manifest.fingerprints(files)} | settings
        check_settings(out, settings)
        checkpoint = find(source)
        tokenizer, bos, _ = data.read_tokenizer(checkpoint)
        template = data.template_of(checkpoint) if config.chat_template else None
        positions = checkpoint.config.max_position
        room = min(positions, settings["max_len"] or positions)
        found = read_prompts(files, tokenizer, bos, template, room, config, report, skip)
        plan = make_plan(found, config)
        report(f"{len(found):,} prompts, {len(plan):,} responses, {_num_slots(plan, config):,} at once")
        params, tree = load()
        target_hash, drafter_hash = params.fingerprints()
        settings |= {
            "target": target_hash,
            "drafter": drafter_hash if tree and params.drafter else None,
            "dtype": params.dtype,
            "tree": tree.name if tree else None,
        }
        check_settings(out, settings)
        write_json(settings_path(out), settings)
        generate(params, tokenizer, plan, out, config, tree, report)
    return len(plan)


def generate(
    params: Params,
    tokenizer: Tokenizer,
    plan: Sequence[ResponseJob],
    out: Path,
    config: GenerateConfig,
    tree: TreeConfig | None = None,
    report: Report = print,
) -> None:
    """Decodes the plan into `out`, one line per row, and continues where an earlier run stopped.

    Rows end in any order; a line waits for all lines before it. With a tree the drafter in `params` drafts.
    """
    begun, total, progress = lines_done(out, plan), len(plan), ProgressReport(report)
    if begun:
        report(f"{out}: {begun:,} of {total:,} lines are written")
    if begun == total:
        return
    asked = {name: getattr(config, name) for name in ("max_new_tokens", *TEXT)}
    requests = [{"prompt": list(j.prompt.tokens), "temperature": j.temperature, "seed": j.seed, **asked} for j in plan]
    # From the whole plan and not from its rest, so that a resumed run compiles programs of the same sizes.
    slots, longest = _num_slots(plan, config), max(len(job.prompt.tokens) for job in plan) + config.max_new_tokens
    answers = texts.write(params, requests[begun:], slots, longest, tree, ordered=True)
    with contextlib.closing(answers), out.open("ab") as file:
        for number, (job, answer) in enumerate(zip(plan[begun:], answers, strict=True), begun + 1):
            if answer.error is not None:
                about = f"{job.prompt.source} at temperature {job.temperature:g} with seed {job.seed}"
                raise ValueError(f"{out}:{number}: no response to {about}: {answer.error}")
            file.write(line_of(tokenizer, job, answer.tokens.tolist()).encode())
            file.flush()
            os.fsync(file.fileno())
            progress.tokens += len(answer.tokens)
            share = (number - begun) / (total - begun)
            progress.say(f"{number:,} of {total:,} lines, {progress.speed}", share)
    report(f"{total:,} lines, {progress.tokens:,} new tokens in this run, {progress.speed}")


def _num_slots(plan: Sequence[ResponseJob], config: GenerateConfig) -> int:
    """The number of rows that are decoded at once."""
    return min(config.batch, len(plan), MOST_SLOTS)


def line_of(tokenizer: Tokenizer, job: ResponseJob, tokens: list[int]) -> str:
    """The line of a file of responses: JSON and a line break."""
    prompt = list(job.prompt.tokens)
    record = {"prompt": job.prompt.text, "response": spoken(tokenizer.decode, prompt, tokens)}
    record |= {"temperature": job.temperature, "seed": job.seed, "source": job.prompt.source}
    record |= {"prompt_tokens": prompt, "response_tokens": tokens}
    return json.dumps(record, ensure_ascii=False) + "\n"
