"""Requests and answers in OpenAI's names, and in vLLM's for what OpenAI has no name.

A field of a request is honoured, or it is refused with an error that names it. None is passed over in silence.
`docs/serve.md` has the table.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from hsd_jax.config import LONGEST_BAD_WORD, MOST_BAD_WORDS, bucket
from hsd_jax.inputs import ROW_HINTS, Row, row_of, with_defaults
from hsd_jax.pair import Params
from hsd_jax.serve.engine import Job, Refused
from hsd_jax.serve.metrics import of_answer
from hsd_jax.session import RequestStats, Taken, TokenLogprobs
from hsd_jax.settings import NumLogprobs, Sampling, SamplingSettings
from hsd_jax.tokenizer import UNFINISHED, IncrementalDecoder, Tokenizer
from hsd_jax.validation import MOST, Count, Whole, parts_of, shown

SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
SAME += ("logit_bias", "seed", "stop", "min_tokens", "ignore_eos", "skip_special_tokens", "prompt_logprobs", "tools")
RENAMED = {
    "max_completion_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "include_stop_str_in_output": "include_stop",
    "chat_template_kwargs": "template",
}
SETTINGS = dict(zip(SAME, SAME, strict=True)) | RENAMED
"""The setting of the library for each field that is one."""
OF_CHAT = "max_completion_tokens", "tools", "chat_template_kwargs"
LABELS = "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"
"""Fields that change no answer with OpenAI, either. They are not stored."""
_TEMPLATE = "chat templates come from the checkpoint alone"
_GRAMMAR = "the text is not constrained by a grammar"
_BEAMS = "there is no beam search"
_CALLS = "calls of tools stay in the text"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), _GRAMMAR),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice"), ((), _GRAMMAR)),
    "guided_grammar": ((), _GRAMMAR),
    "tool_choice": (("none", "auto"), _CALLS),
    "parallel_tool_calls": ((True,), _CALLS),
    "functions": ((), "give tools"),
    "function_call": (("none", "auto"), _CALLS),
    "audio": ((), "text alone is read and written"),
    "modalities": ((["text"],), "text alone is read and written"),
    "mm_processor_kwargs": ((), "text alone is read and written"),
    "web_search_options": ((), "nothing is searched"),
    "reasoning_effort": ((), "give chat_template_kwargs, if the template has a variable for it"),
    "verbosity": ((), "the model has no such setting"),
    "moderation": ((), "nothing is moderated"),
    "store": ((False,), "nothing is stored"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "priority": ((0,), "requests are served in the order in which they come"),
    "suffix": (("",), "the text is continued at its end alone"),
    "best_of": ((1,), "give n"),
    "use_beam_search": ((False,), _BEAMS),
    "length_penalty": ((1, 1.0), _BEAMS),
    "allowed_token_ids": ((), "give logit_bias"),
    "truncate_prompt_tokens": ((), "prompts are not cut"),
    "spaces_between_special_tokens": ((True,), "text is decoded in one way"),
    "return_tokens_as_token_ids": ((False,), "give return_token_ids"),
    "chat_template": ((), _TEMPLATE),
    "documents": ((), "give chat_template_kwargs"),
    "add_special_tokens": ((), "prompts are read in one way"),
    "add_generation_prompt": ((True,), "a last message of the assistant is continued, after others an answer begins"),
    "continue_final_message": ((False,), "a last message of the assistant is continued"),
    "logits_processors": ((), "no code comes with a request"),
    "cache_salt": ((), "--prefix-tokens 0 lets no prompt profit from another"),
}
"""Fields that are known and not served: the values that ask for nothing, and why others are refused."""
CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = CONFIG
    include_usage: bool = False
    include_obfuscation: Annotated[bool, Field(json_schema_extra={"const": False})] = False


def _fields(*names: str, **more: Any) -> dict[str, Any]:
    """Fields of a model, all of which may be null, which is as if they were not there."""
    hints = {name: ROW_HINTS.get(own) or parts_of(SamplingSettings)[own].hint for name, own in SETTINGS.items()}
    hints = {name: hints[name] for name in names} | {name: hint for name, hint in more.items()}
    return {name: (hint | None, None) for name, hint in hints.items()}


Ids = list[Whole]
_COMMON = _fields(
    *(name for name in SETTINGS if name not in OF_CHAT),
    model=str,
    n=Count,
    stream=bool,
    stream_options=StreamOptions,
    stop_token_ids=Ids,
    bad_words=list[str],
    return_token_ids=bool,
    speculate=bool,
    return_passes=bool,
    prediction=dict[str, Any],
    **dict.fromkeys((*LABELS, *REFUSED), Any),
)
Chat: Any = create_model(
    "ChatRequest",
    __config__=CONFIG,
    messages=(Annotated[list[dict[str, Any]], Field(min_length=1)], ...),
    **_COMMON | _fields(*OF_CHAT, logprobs=bool, top_logprobs=NumLogprobs),
)
Completion: Any = create_model(
    "CompletionRequest",
    __config__=CONFIG,
    prompt=(str | Ids | list[str] | list[Ids], ...),
    **_COMMON | _fields(logprobs=NumLogprobs, echo=bool),
)
Tokenize: Any = create_model(
    "TokenizeRequest",
    __config__=CONFIG,
    **_fields("tools", "chat_template_kwargs", model=str, prompt=str, messages=list[dict[str, Any]]),
)
Detokenize: Any = create_model("DetokenizeRequest", __config__=CONFIG, tokens=(Ids, ...), **_fields(model=str))


def read(kind: Any, body: bytes) -> Any:
    """The request in a body of JSON. Raises `Refused`."""
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        first = min(found, key=lambda one: one["type"] != "extra_forbidden")
        if not first["loc"]:
            raise Refused(400, f"the body is not a JSON object ({first['msg']})", code="invalid_json") from None
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            raise Refused(400, f"{name}: unknown field", name, "unknown_field") from None
        said = " or ".join(dict.fromkeys(one["msg"] for one in found if str(one["loc"][0]) == name))
        raise Refused(400, f"{name}: {said}", name, "missing" if first["type"] == "missing" else None) from None
    for name, (harmless, why) in REFUSED.items():
        value = getattr(asked, name, None)
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise Refused(400, f"{name}: refused, because {why}", name, "unsupported_field")
    return asked


def openapi(posts: dict[str, Any], version: str) -> dict[str, Any]:
    """The description of the routes that take a body, by path and kind of request."""
    paths, parts = {}, {}
    for path, kind in posts.items():
        shape = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        parts |= shape.pop("$defs", {}) | {kind.__name__: shape}
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        answers = {"200": {"description": "the answer"}, "default": {"description": "an error"}}
        paths[path] = {"post": {"requestBody": {"required": True, "content": body}, "responses": answers}}
    about = {"title": "hsd serve", "version": version}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": parts}}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    body_bytes: int = 4 * 2**20
    """The largest body."""
    samples: int = 16
    """The most answers of a request: `n` times the number of prompts."""
    seconds: float = 600.0
    """The time of a request, queue included."""


def rows_of_request(asked: Any, params: Params, max_len: int, limits: Limits) -> list[Row]:
    """The rows of a request: `n` of each prompt. Raises `Refused`. This renders and tokenizes, which takes time."""
    is_chat, tokenizer, num = isinstance(asked, Chat), params.tokenizer, asked.n or 1
    prompts = [asked.messages] if is_chat else prompts_of(asked.prompt)
    settings = _settings_of(asked, params)
    if len(prompts) * num > limits.samples:
        what = f"{len(prompts) * num} answers are more than {limits.samples}, the most of this server"
        raise Refused(400, f"n: {what}", "n")
    if asked.bad_words and tokenizer is not None:
        settings["bad_words"] = _spellings_of(tokenizer, asked.bad_words)
    rows = []
    for prompt in prompts:
        try:
            row = row_of(params, prompt, Sampling(**settings), max_len)
        except ValueError as error:
            raise _refused(str(error), asked) from None
        if ids := asked.stop_token_ids:
            own = row.asked.eos
            if wrong := [one for one in ids if one >= params.target_config.vocab_size]:
                raise Refused(400, f"stop_token_ids: {wrong[0]} is no token", "stop_token_ids")
            if bucket(len(own) + len(ids), 4) > bucket(len(own), 4):  # another program would be compiled
                most = bucket(len(own), 4) - len(own)
                raise Refused(400, f"stop_token_ids: at most {most} beside those of the model", "stop_token_ids")
            row = dataclasses.replace(row, asked=dataclasses.replace(row.asked, eos=(*own, *ids)))
        rows += [dataclasses.replace(row, fold=sample) for sample in range(num)]
    return rows


def _settings_of(asked: Any, params: Params) -> dict[str, Any]:
    """The settings of the library."""
    given = {SETTINGS[name]: value for name in SETTINGS if (value := getattr(asked, name, None)) is not None}
    is_chat = isinstance(asked, Chat)
    if is_chat and None not in (asked.max_tokens, asked.max_completion_tokens):
        raise Refused(400, "max_tokens: refused beside max_completion_tokens", "max_tokens")
    if asked.stream_options is not None and not asked.stream:
        raise Refused(400, "stream_options: refused without stream", "stream_options")
    if asked.stream_options is not None and asked.stream_options.include_obfuscation:
        raise Refused(400, "stream_options.include_obfuscation: refused, because nothing is padded", "stream_options")
    if is_chat and asked.top_logprobs is not None and not asked.logprobs:
        raise Refused(400, "top_logprobs: refused without logprobs", "top_logprobs")
    wanted = (asked.top_logprobs or 0 if asked.logprobs else None) if is_chat else asked.logprobs
    if not is_chat and asked.echo and wanted is not None:
        given["prompt_logprobs"] = max(wanted, given.get("prompt_logprobs", 0))
    if asked.stream and "prompt_logprobs" in given:
        name = "prompt_logprobs" if asked.prompt_logprobs is not None else "echo"
        raise Refused(400, f"{name}: log-probabilities of the prompt are refused with stream", name)
    if asked.prediction is not None:
        if asked.speculate is False:
            raise Refused(400, "prediction: refused with speculate=false: only drafts can follow it", "prediction")
        given["prediction"] = _content_of(asked.prediction)
    # Drawn here: the library would ask all processes of a run.
    usual = {"temperature": 1.0, "seed": secrets.randbelow(2**32), "max_new_tokens": None if is_chat else 16}
    own = with_defaults(params, {"defaults": "checkpoint"})
    own.pop("defaults")
    return usual | own | given | {"logprobs": wanted}


def prompts_of(prompt: Any) -> list[Any]:
    """The prompts of a request of completions."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise Refused(400, "prompt: an empty list", "prompt")
    return prompt


def tokens_of(asked: Any, params: Params) -> list[int]:
    """The tokens of a text or a conversation."""
    if (asked.prompt is None) == (asked.messages is None):
        raise Refused(400, "prompt: give a prompt or messages", "prompt")
    settings = {SETTINGS[name]: getattr(asked, name) for name in ("tools", "chat_template_kwargs")}
    prompt = asked.messages if asked.prompt is None else asked.prompt
    try:
        return row_of(params, prompt, Sampling(max_new_tokens=0, **settings), MOST).tokens
    except ValueError as error:
        raise Refused(400, str(error), "messages" if asked.prompt is None else "prompt") from None


def text_of(asked: Any, params: Params) -> str:
    """The text of tokens, special ones included."""
    assert params.tokenizer is not None
    if wrong := [one for one in asked.tokens if one >= params.target_config.vocab_size]:
        raise Refused(400, f"tokens: {wrong[0]} is no token", "tokens")
    return params.tokenizer.decode(asked.tokens, skip_special_tokens=False)


def _content_of(prediction: dict[str, Any]) -> str:
    content = prediction.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if prediction.get("type") != "content" or not isinstance(content, str) or len(prediction) > 2:
        raise Refused(400, "prediction: expected type content, and a content of text", "prediction")
    return content


def _spellings_of(tokenizer: Tokenizer, words: Sequence[str]) -> list[tuple[int, ...]]:
    """The tokens of each word, and those after a space unless they hold the others."""
    found = []
    for word in words:
        texts = word, f" {word.lstrip()}"
        own, spaced = (tuple(tokenizer.raw.encode(text, add_special_tokens=False).ids) for text in texts)
        if not own:
            raise Refused(400, "bad_words: an empty word", "bad_words")
        # White space alone would become a space, which nobody has forbidden.
        kept = [own] if spaced[-len(own) :] == own or not word.strip() else [own, spaced]
        if (num := max(map(len, kept))) > LONGEST_BAD_WORD:
            what = f"{shown(word)} has {num} tokens; allowed are up to {LONGEST_BAD_WORD}"
            raise Refused(400, f"bad_words: {what}", "bad_words")
        found += kept
    if (num := sum(len(one) > 1 for one in found)) > MOST_BAD_WORDS:
        what = f"{len(words)} words are {num} sequences of tokens, those after a space included"
        raise Refused(400, f"bad_words: {what}; allowed are up to {MOST_BAD_WORDS}", "bad_words")
    return found


def _refused(message: str, asked: Any) -> Refused:
    """An error of the library in the request's names."""
    of_prompt = "messages" if isinstance(asked, Chat) else "prompt"
    if "together over max_len" in message:
        return Refused(400, _renamed(message, asked), of_prompt, "context_length_exceeded")
    named = re.match(r"[a-z_]+", message.removeprefix("the prompt: "))
    own = named[0] if named else ""
    field = next((name for name, one in SETTINGS.items() if one == own and getattr(asked, name, None)), None)
    return Refused(400, _renamed(message, asked), own if own in ("bad_words", "prediction") else field or of_prompt)


def _renamed(message: str, asked: Any) -> str:
    """A message with the fields of the request in place of the settings of the library, where it names one."""
    for own in RENAMED.values():
        names = [name for name, one in RENAMED.items() if one == own and name in type(asked).model_fields]
        given = [name for name in names if getattr(asked, name) is not None]
        message = re.sub(rf"(?<!['\w]){own}(?=[=:])", (given or names or [own])[0], message)
    return message


# --- answers ----------------------------------------------------------------------------------------------------------


class Answer:
    """Writes the answer to a request, whole or in chunks."""

    def __init__(self, asked: Any, job: Job, params: Params, model: str):
        assert params.tokenizer is not None
        self.asked, self.job, self.tokenizer, self.is_chat = asked, job, params.tokenizer, isinstance(asked, Chat)
        kind = "chat.completion" if self.is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(16)}",
            "object": f"{kind}.chunk" if self.is_chat and asked.stream else kind,
            "created": int(time.time()),
            "model": model,
        }
        self._has_usage = asked.stream_options is not None and asked.stream_options.include_usage
        self._num_new, self._stats = 0, dict[int, RequestStats]()
        self._begun: set[int] = set()
        """The rows of which something was written."""
        self._decoders: dict[int, tuple[IncrementalDecoder, int]] = {}
        """For each row whose log-probabilities are told, what turns its tokens into text, and the length of that."""

    def whole(self, pieces: Iterable[tuple[int, Taken]]) -> dict[str, Any]:
        """The answer that these pieces are."""
        found = [self._choice(number, taken) for number, taken in _joined(pieces)]
        more: dict[str, Any] = {"usage": self.usage, "metrics": self.metrics}
        if self.is_chat and self.asked.prompt_logprobs is not None:
            more["prompt_logprobs"] = found[0]["prompt_logprobs"]
            found = [{name: one[name] for name in one if name != "prompt_logprobs"} for one in found]
        return self._head | {"choices": found} | more

    def chunks(self, pieces: Iterable[tuple[int, Taken]]) -> list[dict[str, Any]]:
        """A chunk for each row of these pieces that says something."""
        found = []
        for number, taken in _joined(pieces):
            choice = self._choice(number, taken)
            if taken[-1].finish_reason or any(len(one.tokens) or one.text for one in taken):
                found.append(self._head | {"choices": [choice]} | ({"usage": None} if self._has_usage else {}))
        if found and self.job.num_left == 0:
            if self._has_usage:
                found.append(self._head | {"choices": [], "usage": self.usage})
            found[-1]["metrics"] = self.metrics
        return found

    @property
    def usage(self) -> dict[str, Any]:
        """The numbers of tokens so far."""
        prompts = [number for number, row in enumerate(self.job.rows) if row.fold == 0]
        num = sum(len(self.job.rows[number].tokens) for number in prompts)
        found: dict[str, Any] = {"prompt_tokens": num, "completion_tokens": self._num_new}
        found["total_tokens"] = num + self._num_new
        cached = sum(self._stats[number].num_cached for number in prompts if number in self._stats)
        found["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.asked.prediction is not None:
            names = "accepted_prediction_tokens", "rejected_prediction_tokens"
            counts = {name: sum(stats.drafter.get(name, 0) for stats in self._stats.values()) for name in names}
            found["completion_tokens_details"] = counts
        return found

    @property
    def metrics(self) -> dict[str, Any]:
        """Those of the answer. Null for speculation if there are several rows, as in vLLM."""
        return of_answer(self.job, self._stats.get(0) if len(self.job.rows) == 1 else None, self._num_new)

    def _choice(self, number: int, taken: Sequence[Taken]) -> dict[str, Any]:
        """What a row says in these pieces."""
        text, tokens, last = "".join(one.text or "" for one in taken), _tokens_of(taken), taken[-1]
        is_first, self._num_new = number not in self._begun, self._num_new + len(tokens)
        self._begun.add(number)
        self._stats |= {} if last.stats is None else {number: last.stats}
        choice: dict[str, Any] = {"index": number}
        prompt = self.job.rows[number].tokens
        echoed = prompt if is_first and not self.is_chat and self.asked.echo else []
        if not self.is_chat:
            choice["text"] = self.tokenizer.decode(echoed) + text if echoed else text
        elif self.asked.stream:
            choice["delta"] = ({"role": "assistant"} if is_first else {}) | {"content": text}
        else:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        choice["logprobs"] = self._logprobs(number, tokens, taken, echoed)
        choice |= {"finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
        if self.asked.return_token_ids:
            choice |= {"token_ids": tokens} | ({"prompt_token_ids": prompt} if is_first else {})
        if self.asked.return_passes:
            choice["passes"] = [[one.text, len(one.tokens)] for one in taken if len(one.tokens) or one.text]
        if self.asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._of_prompt(prompt, last.prompt_logprobs)
        return choice

    def _logprobs(self, number: int, tokens: list[int], taken: Sequence[Taken], echoed: list[int]) -> Any:
        told = [one.logprobs for one in taken if one.logprobs is not None]
        if not told:
            return None
        entries = [entry for one in told for entry in self._entries(one)]
        if echoed and (of_prompt := taken[-1].prompt_logprobs) is not None:
            entries = [(None, {}), *list(self._entries(of_prompt, told[0].tokens.shape[1]))[1:], *entries]
        named = list(zip([*echoed, *tokens], entries, strict=True))
        if self.is_chat:
            content = [
                self._named(token, value) | {"top_logprobs": [self._named(*one) for one in best.items()]}
                for token, (value, best) in named
            ]
            return {"content": content, "refusal": None}
        texts = [self._text(token) for token, _ in named]
        return {
            "tokens": texts,
            "token_logprobs": [value for _, (value, _) in named],
            "top_logprobs": [
                None if value is None else {self._text(one): x for one, x in ({token: value} | best).items()}
                for token, (value, best) in named
            ],
            "text_offset": self._places(number, echoed, tokens),
        }

    def _places(self, number: int, echoed: list[int], tokens: list[int]) -> list[int]:
        """Where the text of each token begins. All tokens of a character begin where it does."""

        def ends_of(decoder: IncrementalDecoder, tokens: list[int], start: int) -> list[int]:
            return list(itertools.accumulate((len(decoder.push([one])) for one in tokens), initial=start))

        row, before = self.job.rows[number], ends_of(IncrementalDecoder(self.tokenizer), echoed, 0)[:-1]
        if number not in self._decoders:
            decoder = IncrementalDecoder(self.tokenizer, row.tokens, row.asked.skip_special_tokens)
            self._decoders[number] = decoder, len(self.tokenizer.decode(echoed)) if echoed else 0
        decoder, start = self._decoders[number]
        ends = ends_of(decoder, tokens, start)
        self._decoders[number] = decoder, ends[-1]
        return before + ends[:-1]

    def _entries(self, told: TokenLogprobs, most: int | None = None) -> Iterable[tuple[Any, dict[int, float]]]:
        """The value of each token, and the likeliest tokens with theirs."""
        for chosen, tokens, values in zip(*(x.tolist() for x in told), strict=True):
            yield _finite(chosen), dict(zip(tokens[:most], map(_finite, values[:most]), strict=True))

    def _text(self, token: int) -> str:
        return _spelled(self.tokenizer, token)[0]

    def _named(self, token: int, value: float | None) -> dict[str, Any]:
        text, spelled = _spelled(self.tokenizer, token)
        return {"token": text, "logprob": value, "bytes": list(spelled)}

    def _of_prompt(self, prompt: list[int], told: TokenLogprobs | None) -> Any:
        """`prompt_logprobs` as vLLM writes them."""
        if told is None:
            return None
        found: list[Any] = [None]
        for token, (value, best) in list(zip(prompt, self._entries(told), strict=True))[1:]:
            ranks = {one: rank for rank, one in enumerate(best, 1)}
            found.append(
                {
                    str(one): {"logprob": x, "rank": ranks.get(one), "decoded_token": self._text(one)}
                    for one, x in ({token: value} | best).items()
                }
            )
        return found


def _joined(pieces: Iterable[tuple[int, Taken]]) -> list[tuple[int, list[Taken]]]:
    """The pieces of each row, by its number."""
    found: dict[int, list[Taken]] = {}
    for number, taken in pieces:
        found.setdefault(number, []).append(taken)
    return sorted(found.items())


def _tokens_of(taken: Sequence[Taken]) -> list[int]:
    return [token for one in taken for token in one.tokens.tolist()]


def _finite(value: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for it."""
    return value if math.isfinite(value) else -9999.0


@functools.lru_cache(maxsize=4096)
def _spelled(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """The text of a token alone, with the space that it begins with, and its bytes."""
    text, written = tokenizer.decode([token], skip_special_tokens=False), tokenizer.spelling(token)
    if written.startswith("▁") and not text.startswith(" "):  # a SentencePiece decoder drops it
        text = f" {text}"
    if UNFINISHED not in text:
        return text, text.encode()
    if found := re.fullmatch(r"<0x([0-9A-F]{2})>", written):
        return text, bytes.fromhex(found[1])
    glyphs = _byte_glyphs()
    return text, bytes(glyphs[c] for c in written) if all(c in glyphs for c in written) else text.encode()


@functools.cache
def _byte_glyphs() -> dict[str, int]:
    """The byte of each character that a byte-level tokenizer writes."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte) if byte in own else chr(256 + others.index(byte)): byte for byte in range(256)}


def to_json(value: Any) -> bytes:
    """A value as JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
