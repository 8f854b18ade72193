"""Writes the target's own responses as training data: a plan of seeded jobs, and a file that a later run can resume.

A drafter learns best from text that the target wrote. Every row has its own temperature and seed, which depend only on
the number of its prompt. Rows come and go in the slots of one session, and the plan fixes the order of their lines. So
an interrupted run ends with the same file as one that was not interrupted. `hsd generate-data` calls this module, and
`documents.py` reads the file. Read first: `response_prompts.py`.
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
from hsd_jax.host.files import check_new_file, parse_json, read_json, write_json
from hsd_jax.models.checkpoint import Source, find
from hsd_jax.params import Params
from hsd_jax.planning import texts
from hsd_jax.session import MOST_SLOTS, Generated
from hsd_jax.train import data, manifest
from hsd_jax.train.journal import ProgressReport, Report
from hsd_jax.train.records import check_file
from hsd_jax.train.response_prompts import GenerateConfig, Prompt, draw, read_prompts
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
    """Refuses to continue a result that was made with other settings, or that cannot be written.

    Args:
      settings: all settings of the run, or some of them.
    Raises:
      FileNotFoundError: if the folder of `out` is missing.
      OSError: if no file can be written there.
      ValueError: naming the first different setting, or a file that `hsd generate-data` did not write.
    """
    out, path = Path(out), settings_path(out)
    if out.suffix != ".jsonl":
        raise ValueError(f"{out}: expected a name that ends in .jsonl")
    check_new_file(out)
    if not out.exists():
        return  # no line was written, so stored settings do not matter
    if not out.is_file():
        raise ValueError(f"{out}: is no regular file; choose another name")
    if not path.is_file():
        raise ValueError(f"{out}: exists, but {path.name} does not: choose another name, or move the file away")
    try:
        there = read_json(path)
        if not isinstance(there, dict):
            raise ValueError(f"{path}: expected a JSON object")
    except ValueError as error:
        raise ValueError(f"{error}; choose another name for the result") from error
    for name, here in json.loads(json.dumps(settings)).items():
        if name not in there or there[name] != here:
            raise ValueError(
                f"{out} was started with other settings: {name} is {there.get(name, 'missing')!r} there and {here!r}"
                " here; choose another name, or the same settings to continue"
            )


def lines_done(out: Path, jobs: Sequence[ResponseJob]) -> int:
    """The number of complete lines of an unfinished result. Removes an incomplete last line from the file.

    Raises:
      ValueError: naming the first line that does not belong to this plan.
    """
    if not out.is_file():
        return 0
    content = out.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(out, whole)
    lines = content[:whole].split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        job = jobs[number - 1] if number <= len(jobs) else None
        try:
            record = parse_json(line, str(out))
            found = record["source"], record["seed"], tuple(record["prompt_tokens"])
        except (ValueError, KeyError, TypeError):
            found = None
        if job is None or found != (job.prompt.source, job.seed, job.prompt.tokens):
            raise ValueError(f"{out}:{number}: not a line of this run; choose another name, or move the file away")
    return len(lines)


def run(
    files: Sequence[str | Path],
    out: Path,
    source: Source,
    config: GenerateConfig,
    settings: dict[str, Any],
    load: Callable[[], tuple[Params, TreeConfig | None]],
    report: Report,
    skip_bad_lines: bool = False,
) -> int:
    """Reads the prompts, checks the settings, then loads the target and writes its responses.

    Args:
      source: the target (`models/checkpoint.py`).
      settings: other settings that the text depends on and that are known before weights are read: precision, mesh,
        max_len.
      load: returns the models and the tree of their drafter, or None for plain decoding.
      skip_bad_lines: as in `records.read_file`. The text of a prompt does not depend on it.
    Returns:
      The number of responses.
    Raises:
      FileNotFoundError: if a file of prompts is missing.
      ValueError: as `check_settings` and `generate`.
    """
    for path in files:
        check_file(path)
    settings = dataclasses.asdict(config) | {"prompts": manifest.fingerprints(files)} | settings
    check_settings(out, settings)
    checkpoint = find(source)
    positions = checkpoint.config.max_position
    tokenizer, bos, _ = data.read_tokenizer(checkpoint)
    template = data.template_of(checkpoint) if config.chat_template else None
    room = min(positions, settings["max_len"] or positions)
    found = read_prompts(files, tokenizer, bos, template, room, config, report, skip_bad_lines)
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
    return generate(params, tokenizer, plan, out, settings, config, tree, report)


def generate(
    params: Params,
    tokenizer: Tokenizer,
    plan: Sequence[ResponseJob],
    out: str | Path,
    settings: dict[str, Any],
    config: GenerateConfig,
    tree: TreeConfig | None = None,
    report: Report = print,
) -> int:
    """Decodes the plan into `out`, one line per row, and continues where an earlier run with the same settings stopped.

    Args:
      tokenizer: the target's, as `data.read_tokenizer` reads it.
      settings: everything the text depends on.
      tree: for the drafter in `params`; None: plain decoding.
    Returns:
      The number of lines.
    Raises:
      ValueError: as `check_settings` and `lines_done`, if another process is writing the file, if the disk is full, or
        naming the job to which the target gave no distribution of a next token; all lines before it stay.
    """
    out = Path(out)
    with lock.held(lock.beside(out)):
        check_settings(out, settings)  # `run` has, but another process may have written since
        done = lines_done(out, plan)
        write_json(settings_path(out), settings)
        if done:
            report(f"{out}: {done:,} of {len(plan):,} lines are written")
        if done < len(plan):
            _write_lines(params, tokenizer, plan, out, done, config, tree, report)
    return len(plan)


def _write_lines(
    params: Params,
    tokenizer: Tokenizer,
    plan: Sequence[ResponseJob],
    out: Path,
    done: int,
    config: GenerateConfig,
    tree: TreeConfig | None,
    report: Report,
) -> None:
    """Appends the lines of the plan from number `done` on. Rows end in any order; a line waits for all lines before
    it."""
    begun, ended, total = done, dict[int, Generated](), len(plan)
    progress = ProgressReport(report)
    asked = {name: getattr(config, name) for name in ("max_new_tokens", "top_k", "top_p")}
    requests = [
        {"prompt": list(job.prompt.tokens), "temperature": job.temperature, "seed": job.seed, **asked}
        for job in plan[begun:]
    ]
    # From the whole plan and not from its rest, so that a resumed run compiles programs of the same sizes.
    slots, longest = _num_slots(plan, config), max(len(job.prompt.tokens) for job in plan) + config.max_new_tokens
    answers = texts.write(params, requests, slots, longest, tree)
    with contextlib.closing(answers), out.open("ab") as file:
        for answer in answers:
            ended[begun + answer.index] = answer
            text = ""
            while (following := ended.pop(done, None)) is not None and following.error is None:
                text += line_of(tokenizer, plan[done], following.tokens.tolist())
                done += 1
            if text:
                try:
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
                except OSError as error:
                    raise ValueError(f"{out}: cannot be written ({error}); the same command will continue") from error
            if following is not None:
                job = plan[done]
                raise ValueError(
                    f"{out}:{done + 1}: no response to {job.prompt.source} at temperature {job.temperature:g} with seed"
                    f" {job.seed}: {following.error}. The lines before it are written"
                )
            progress.tokens += len(answer.tokens)
            ahead = f", {len(ended):,} more are ready" if ended else ""
            if done < total:
                share = (done + len(ended) - begun) / (total - begun)
                progress.say(f"{done:,} of {total:,} lines{ahead}, {progress.speed}", share)
    report(f"{total:,} lines, {progress.tokens:,} new tokens in this run, {progress.speed}")


def _num_slots(plan: Sequence[ResponseJob], config: GenerateConfig) -> int:
    """The number of rows that are decoded at once."""
    return min(config.batch, len(plan), MOST_SLOTS)


def line_of(tokenizer: Tokenizer, job: ResponseJob, tokens: list[int]) -> str:
    """The line of a file of responses: JSON and a line break."""
    prompt = list(job.prompt.tokens)
    record = {
        "prompt": job.prompt.text,
        "response": spoken(tokenizer.decode, prompt, tokens),
        "temperature": job.temperature,
        "seed": job.seed,
        "source": job.prompt.source,
        "prompt_tokens": prompt,
        "response_tokens": tokens,
    }
    return json.dumps(record, ensure_ascii=False) + "\n"
