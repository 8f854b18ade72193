"""Frozen, hashable configurations, which are static in every compiled function.

This module uses no arrays. The annotation of a field gives its allowed values (`validation.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from hsd_jax import validation
from hsd_jax.validation import Count, Number, OneOf, Positive, PositiveShare, Whole

SLIDING = "sliding_attention"
FULL = "full_attention"
RECURRENT, PARALLEL = TRUNKS = ("recurrent", "parallel")
"""Kinds of trunk: K passes over one state each, or one pass over K slots."""
LARGEST_TREE = 256
"""The largest number of nodes of a tree."""
MOST_BAD_WORDS, LONGEST_BAD_WORD = 64, 8
"""The largest number of forbidden sequences of a row, and of tokens of one. Single tokens are not among them."""
MOST_LOGPROBS = 20
"""The largest number of likeliest tokens whose log-probabilities a row may ask for."""
NO_REUSE_FORM, SUM, SKIP, AHEAD = REUSES = ("none", "sum", "skip", "ahead")
"""How later rounds use the trunk states that a round did not use (`drafters/hidden/reuse.py`)."""
Reuse = Annotated[str, OneOf(REUSES)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
HeadDim = Annotated[int, Field(ge=1, le=65_536)]
Theta = Annotated[float, Field(ge=1e-6, le=1e30)]
TreeNodes = Annotated[int, Field(ge=2, le=LARGEST_TREE)]
ChainLength = Annotated[int, Field(ge=1, le=LARGEST_TREE - 1)]
FeatureLayer = Annotated[int, Field(ge=-1, le=10_000)]
Steps = Annotated[int, Field(ge=1, le=2 * LARGEST_TREE)]
PRECISIONS = ("fast", "exact")
"""Allowed values of `precision`, see `pair.load`."""
Precision = Annotated[str, OneOf(PRECISIONS)]
QUANTIZED = ("int8",)
"""Types to which weights may be quantized."""
Quantized = Annotated[str, OneOf(QUANTIZED)]
RopeKind = Annotated[str, OneOf(("default", "linear", "dynamic", "llama3", "yarn"))]
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
LayerType = Annotated[str, OneOf((FULL, SLIDING))]


@validation.dataclass
class RopeConfig:
    """Rotary embedding of one kind of layer. Which numbers `kind` reads: `models/layers.rope_frequencies`.

    "dynamic" is "default" up to `max_position` tokens. No longer text is decoded: there the frequencies depend on the
    length of the text, and cached keys keep those of an earlier length, so the text would depend on the passes.
    """

    theta: Theta = 10_000.0
    kind: RopeKind = "default"
    factor: Positive = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position: Count = 8192
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    attention_factor: Positive = 1.0
    """Multiplies cosines and sines, so that scores are multiplied by its square."""

    def __post_init__(self):
        for high, low in (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow")):
            if not getattr(self, high) > getattr(self, low):
                raise ValueError(f"rope: {high}={getattr(self, high)} must be above {low}={getattr(self, low)}")
        if self.kind == "yarn" and self.theta <= 1:
            raise ValueError(f"rope: theta={self.theta} must be above 1 for YaRN")


def _check_heads(config: Any, section: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{section}.num_kv_heads={config.num_kv_heads}: must divide num_heads={config.num_heads}")
    if config.head_dim % 2:
        raise ValueError(f"{section}.head_dim={config.head_dim}: must be even for rotary embedding")


@validation.dataclass
class ModelConfig:
    """One parameterised decoder: Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3 are settings of it."""

    vocab_size: Count
    hidden_size: Count
    num_layers: Layers
    num_heads: Count
    num_kv_heads: Count
    head_dim: HeadDim
    intermediate_size: Count
    max_position: Count = 2048
    norm_eps: PositiveShare = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Annotated[str, OneOf(ACTIVATIONS)] = "silu"
    norm_offset: Number = 0.0
    """Added to every norm weight: Gemma stores weight - 1."""
    post_norms: bool = False
    """Gemma's second norm after attention and after the MLP."""
    embed_scale: Positive = 1.0
    query_scale: Positive | None = None
    """None: head_dim ** -0.5."""
    attention_softcap: Positive | None = None
    logit_softcap: Positive | None = None
    sliding_window: Count | None = None
    layer_types: tuple[LayerType, ...] = ()
    """SLIDING or FULL for each layer. Empty: all are FULL."""
    rope: RopeConfig = RopeConfig()
    rope_local: RopeConfig | None = None
    """Rotary embedding of SLIDING layers if it differs from `rope` (Gemma 3)."""
    model_type: str = "llama"
    stored_vocab_size: ClassVar[int | None] = None
    """The size of the vocabulary in the model's own files, if it drafts for a model of another size
    (`drafters/small_lm.py`)."""

    def __post_init__(self):
        _check_heads(self, "ModelConfig")

    @property
    def num_tokens(self) -> int:
        """The number of tokens, from 0, that the model knows. Its logits of the others are -inf."""
        return min(self.vocab_size, self.stored_vocab_size or self.vocab_size)

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def layer_type(self, layer: int) -> str:
        return self.layer_types[layer] if self.layer_types else FULL


def model_of(config: ModelConfig) -> ModelConfig:
    """The fields of a language model alone, without those that its role as a drafter adds."""
    return ModelConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)})


@validation.dataclass
class DrafterConfig:
    """A drafter that is trained on its target's features. Each kind is a subclass in its own folder of `drafters/`."""

    kind: ClassVar[str]
    rank: ClassVar[int] = 0
    """Rank of the token-information factors. 0: the drafter has none."""
    committed_embeddings: ClassVar[bool] = False
    """Whether it reads the embeddings of committed tokens with the target's features (methods.md, A1)."""

    _: dataclasses.KW_ONLY
    hidden_size: Count
    vocab_size: Count
    num_steps: Steps = 6
    """The number of states per round K, as trained. A tree may be shallower but not deeper."""
    norm_eps: PositiveShare = 1e-5
    max_position: Count = 2048
    target_hash: str = ""
    """Fingerprint of the target the drafter was trained for."""
    vocabulary_hash: str = dataclasses.field(default="", repr=False)
    """Fingerprint of that target's vocabulary. A fine-tuned version of the target shares it. Empty: unknown. It is not
    part of `repr`, by which a drafter is known."""
    feature_layers: tuple[Whole, ...] = ()
    """Layers of the target, counted from 0 and ascending, after which the drafter reads the residual stream
    (methods.md, A2). Empty: it reads the final hidden state."""
    reduced_vocab_size: Count | None = None
    """Size of the reduced draft vocabulary, the tokens that may be drafted. None: all tokens may be drafted.
    `draft_to_target` in the drafter's weights lists them."""
    profile: tuple[Number, ...] = ()
    """Acceptance probabilities of a chain by depth, measured on held-out greedy text. Empty: not measured. They decide
    how a call is decoded (`planning/plan.py`) and never change its text."""
    sampled_profile: tuple[Number, ...] = ()
    """The acceptance probabilities at temperature 1 with COUPLED drafts."""

    def __post_init__(self):
        if list(self.feature_layers) != sorted(set(self.feature_layers)):
            raise ValueError(f"DrafterConfig.feature_layers={self.feature_layers!r}: expected ascending layer numbers")
        if self.reduced_vocab_size is not None and self.reduced_vocab_size > self.vocab_size:
            raise ValueError(f"reduced_vocab_size={self.reduced_vocab_size}: allowed are 1 to {self.vocab_size}")

    @property
    def draft_vocab_size(self) -> int:
        """The number of columns of the drafter's logits: one for each token that may be drafted."""
        return self.vocab_size if self.reduced_vocab_size is None else self.reduced_vocab_size

    def check_feature_layers(self, num_layers: int) -> None:
        """Raises a ValueError if the drafter reads a layer that a target of `num_layers` does not have."""
        if self.feature_layers and self.feature_layers[-1] >= num_layers:
            raise ValueError(f"feature_layers={list(self.feature_layers)}: the target has layers 0 to {num_layers - 1}")


@validation.dataclass
class TrunkConfig(DrafterConfig):
    """A drafter with a trunk of decoder layers (`models/trunk.py`)."""

    trunk: ClassVar[str] = RECURRENT
    committed_embeddings: ClassVar[bool] = True
    reads_drafts: ClassVar[bool] = False
    """Whether its states depend on drafted tokens. If so, a tree costs one pass per level."""
    pairs_in_attention: ClassVar[bool] = False
    """Whether it reads drafts by the attention of its first layer (`layers.Block`) and not by a product before it."""
    activation: ClassVar[str] = "silu"
    """This and the next fields are those of `ModelConfig` that its layers do not have."""
    norm_offset: ClassVar[float] = 0.0
    attention_softcap: ClassVar[float | None] = None
    post_norms: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False
    output_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    _: dataclasses.KW_ONLY
    num_layers: Layers
    num_heads: Count
    num_kv_heads: Count
    head_dim: HeadDim
    intermediate_size: Count
    rope: RopeConfig = RopeConfig()
    window: Count | None = None
    """The number of positions that the trunk sees, its own included. None: all. Rotary positions are relative, so with
    a window no context is longer than in training."""

    def __post_init__(self):
        super().__post_init__()
        _check_heads(self, "DrafterConfig")
        least = 2 * self.num_steps  # so that a round sees all states that it reads and computes
        if self.window is not None and self.window < least:
            raise ValueError(f"DrafterConfig.window={self.window}: allowed are 2 * num_steps = {least} and more")

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5


_FILLED_IN: Any = None
"""The default of a field whose value `__post_init__` computes."""


@validation.dataclass
class TreeConfig:
    """Shape of the draft tree, of 8x5x3 if nothing is given. A chain has `width=1` and `nodes=depth + 1`."""

    nodes: TreeNodes = _FILLED_IN
    """Nodes of the tree, the root included (N)."""
    depth: Count = _FILLED_IN
    """Length of the longest path, in tokens (D)."""
    width: Count = _FILLED_IN
    """Nodes expanded per level, and the largest number of children of a node; 1 is a chain."""
    branching: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """Number of children of every node of a level, level by level from the root. It replaces the other three: (3, 2, 1)
    gives 3 nodes below the root, then 6, then 6. `width` is then the largest of these numbers."""

    def __post_init__(self):
        given = {name: getattr(self, name) for name in ("nodes", "depth", "width") if getattr(self, name) is not None}
        shape = {"nodes": 8, "depth": 5, "width": 3} | given
        if self.branching is not None:
            nodes = 1 + sum(self.level_widths())
            shape = {"nodes": nodes, "depth": len(self.branching), "width": max(self.branching)}
            if nodes > LARGEST_TREE:
                raise ValueError(
                    f"TreeConfig.branching={validation.shown(self.branching)}: more than {LARGEST_TREE} nodes"
                )
            if given and given != shape:  # a record stores all four fields
                raise ValueError(f"TreeConfig: branching={self.branching} gives {shape}, not {given}")
        for name, value in shape.items():
            object.__setattr__(self, name, value)
        for name in ("depth", "width"):
            if shape[name] > self.nodes - 1:
                raise ValueError(f"TreeConfig.{name}={shape[name]}: allowed are 1 to nodes - 1 = {self.nodes - 1}")
        available = most_nodes(self.depth, self.width)
        if self.branching is None and available < self.nodes:
            raise ValueError(f"TreeConfig.nodes={self.nodes}: depth and width allow at most {available}")

    @classmethod
    def parse(cls, name: str) -> TreeConfig:
        """The tree of a `name`. Raises a ValueError if there is none."""
        text = name.strip()
        by = "." if "." in text else "x"
        numbers = text.removesuffix(".").split(by)
        if not all(n.isdigit() for n in numbers) or (by == "x" and len(numbers) != 3):
            allowed = "NODESxDEPTHxWIDTH, for example 8x5x3, and a branching, as in 3.2.1"
            raise ValueError(f"tree={validation.shown(name)}: allowed are {allowed}")
        counts = tuple(map(int, numbers))
        return cls(branching=counts) if by == "." else cls(counts[0], counts[1], counts[2])

    @classmethod
    def chain(cls, depth: int) -> TreeConfig:
        """The tree that is a single path of `depth` draft tokens."""
        return cls(depth + 1, depth, 1)

    @classmethod
    def fitting(cls, nodes: int, depth: int, width: int) -> TreeConfig:
        """The tree of this depth and width with `nodes` nodes, or with as many as it has room for."""
        return cls(min(nodes, most_nodes(depth, width)), depth, width)

    @property
    def name(self) -> str:
        """The shape as a text: nodes x depth x width, as in "8x5x2", or a branching, as in "3.2.1" or "3."."""
        if self.branching is not None:
            return ".".join(map(str, self.branching)) + "." * (self.depth == 1)
        return f"{self.nodes}x{self.depth}x{self.width}"

    @property
    def description(self) -> str:
        """The shape in words."""
        whole = f"{self.nodes} nodes, depth {self.depth}, "
        return whole + (f"width {self.width}" if self.branching is None else f"branching {self.name}")

    @property
    def most_expanded(self) -> int:
        """The largest number of nodes of one level that get children."""
        return self.width if self.branching is None else math.prod(self.branching[:-1])

    def level_widths(self) -> tuple[int, ...]:
        """The number of nodes of each level, for drawn trees and trees with a `branching`.

        Without `branching` each level has at least one node, and the remaining nodes widen the first levels, because
        most rounds reach those.
        """
        if self.branching is not None:
            return tuple(itertools.accumulate(self.branching, operator.mul))
        if self.nodes - 1 > self.depth * self.width:
            most = self.depth * self.width + 1
            raise ValueError(f"TreeConfig.nodes={self.nodes}: a drawn tree of this depth and width has at most {most}")
        spare, widths = self.nodes - 1 - self.depth, []
        for _ in range(self.depth):
            extra = min(spare, self.width - 1)
            widths.append(1 + extra)
            spare -= extra
        return tuple(widths)


def most_nodes(depth: int, width: int) -> int:
    """Nodes of the largest tree of this depth and width, the root included."""
    return 1 + width + (depth - 1) * width**2


Tree = Annotated[
    TreeConfig | str, BeforeValidator(lambda tree: TreeConfig.parse(tree) if isinstance(tree, str) else tree)
]
"""A tree, or its name, which becomes the tree."""


@validation.dataclass
class ReuseConfig:
    """How later rounds use the trunk states that a round did not use.

    Args:
      form: one of REUSES.
      min_spares: for SKIP only: a row with at least this number of spare states drafts from them without running the
        trunk. None: the depth of the tree, or the number of states that a round without an accepted token leaves,
        whichever is smaller.
    """

    form: Reuse = NO_REUSE_FORM
    min_spares: Count | None = None

    def __post_init__(self):
        if self.min_spares is not None and self.form != SKIP:
            raise ValueError(f"reuse={self}: allowed with a number is only {SKIP}:N")

    @classmethod
    def parse(cls, text: str) -> ReuseConfig:
        """From "none", "sum", ..., "skip" or "skip:2"."""
        form, colon, number = text.partition(":") if isinstance(text, str) else (text, "", "")
        validation.take(Reuse, form, "reuse")
        return cls(form, validation.parse(Count, number, f"reuse={form}:N with N")) if colon else cls(form)

    def __str__(self) -> str:
        return self.form if self.min_spares is None else f"{self.form}:{self.min_spares}"

    def num_states(self, depth: int, num_steps: int) -> int:
        """The number of trunk states of a run (K) for a tree of `depth`.

        It exceeds `depth` if later rounds need more states. AHEAD drafts from states that are up to `depth` + 1 tokens
        old. SKIP computes all states that the trunk was trained for.
        """
        return {SKIP: num_steps, AHEAD: 2 * depth + 1}.get(self.form, depth)


NO_REUSE = ReuseConfig()


def weights_of_layer(config: Any) -> int:
    """The number of weights of a decoder layer, without its norms."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)


def weights_of_trunk(config: Any) -> int:
    """The number of weights of a trunk, without norms: its layers, and the product of a feature and an embedding."""
    return config.num_layers * weights_of_layer(config) + 2 * config.hidden_size**2


def bucket(n: int, smallest: int = 16) -> int:
    """The smallest power of two not below `n`, but at least `smallest`. Few sizes mean few compilations."""
    return max(smallest, 1 << max(0, math.ceil(math.log2(max(n, 1)))))
