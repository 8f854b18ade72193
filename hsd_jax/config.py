"""Frozen, hashable configuration: what is static in every compiled function.

No array is touched here. A field's annotation says what it may hold (`settings.py`). Read next:
`models/target.py` for what the fields of `ModelConfig` switch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, ClassVar

from pydantic import Field

from hsd_jax import settings
from hsd_jax.settings import Count, Number, OneOf, Positive, Whole

SLIDING = "sliding_attention"
FULL = "full_attention"
RECURRENT, PARALLEL = TRUNKS = ("recurrent", "parallel")
"""Kinds of trunk: K passes over one state each, or one pass over K slots."""
LARGEST_TREE = 256
"""Nodes of a tree."""
NONE, SUM, SKIP, AHEAD, UNFUSED = REUSES = ("none", "sum", "skip", "ahead", "unfused")
"""What becomes of the states a round leaves over (`drafters/hidden/reuse.py` says what each form does)."""
Reuse = Annotated[str, OneOf(REUSES)]


Layers = Annotated[int, Field(ge=1, le=10_000)]
HeadDim = Annotated[int, Field(ge=1, le=65_536)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
Theta = Annotated[float, Field(ge=1e-6, le=1e30)]
PRECISIONS = ("fast", "exact")
"""Of the arithmetic: see `params.load`."""
Precision = Annotated[str, OneOf(PRECISIONS)]
QUANTIZED = ("int8",)
"""What weights may be quantized to."""
Quantized = Annotated[str, OneOf(QUANTIZED)]
ROPE_KINDS = ("default", "linear", "llama3")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
LayerType = Annotated[str, OneOf((FULL, SLIDING))]


@settings.dataclass
class RopeConfig:
    """Rotary embedding of one kind of layer; `kind` is one of ROPE_KINDS."""

    theta: Theta = 10_000.0
    kind: Annotated[str, OneOf(ROPE_KINDS)] = "default"
    factor: Positive = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position: Count = 8192


def _check_heads(config: Any, section: str) -> None:
    if config.num_heads % config.num_kv_heads:
        kv_heads = f"{section}.num_kv_heads={config.num_kv_heads}"
        raise ValueError(f"{kv_heads}: must divide num_heads={config.num_heads}")
    if config.head_dim % 2:
        raise ValueError(f"{section}.head_dim={config.head_dim}: must be even for rotary embedding")


@settings.dataclass
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
    norm_eps: Epsilon = 1e-5
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
    """One of SLIDING or FULL a layer; empty: all FULL."""
    rope: RopeConfig = RopeConfig()
    rope_local: RopeConfig | None = None
    """Rotary embedding of SLIDING layers, if another than `rope` (Gemma 3)."""
    model_type: str = "llama"

    def __post_init__(self):
        _check_heads(self, "ModelConfig")

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def layer_type(self, layer: int) -> str:
        return self.layer_types[layer] if self.layer_types else FULL


def model_of(config: ModelConfig) -> ModelConfig:
    """A language model in whatever role, without it."""
    return ModelConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)})


@settings.dataclass
class DrafterConfig:
    """A drafter that is trained on its target's features; each kind is a subclass, in its room under `drafters/`."""

    kind: ClassVar[str]
    rank: ClassVar[int] = 0
    """Of the token-information factors; 0: the drafter has none."""
    committed_embeddings: ClassVar[bool] = False
    """Embeddings of committed tokens beside the target's features (methods.md, A1)."""

    _: dataclasses.KW_ONLY
    hidden_size: Count
    vocab_size: Count
    num_steps: Annotated[int, Field(ge=1, le=2 * LARGEST_TREE)] = 6
    """States per round K, as trained; a tree may be shallower, never deeper."""
    norm_eps: Epsilon = 1e-5
    max_position: Count = 2048
    target_hash: str = ""
    """Fingerprint of the target the drafter was trained for."""
    vocabulary_hash: str = dataclasses.field(default="", repr=False)
    """Fingerprint of that target's vocabulary, which a fine-tune of it shares; empty: unknown. Left out of `repr`, by
    which records of `tune` know a drafter."""
    feature_layers: tuple[Whole, ...] = ()
    """Layers of the target, counted from 0 and ascending, after which the drafter reads the residual stream
    (methods.md, A2); empty: the final hidden state."""
    reduced_vocab_size: Count | None = None
    """Size of the reduced draft vocabulary, the tokens that may be drafted; None: all. `draft_to_target` of the
    drafter's weights lists them."""
    profile: tuple[Number, ...] = ()
    """Of held-out greedy text: the share of a chain's drafts that the target accepts, by depth, where all before were.
    Empty: never measured. It decides how calls are decoded (`planning/plan.py`), never what comes out."""
    sampled_profile: tuple[Number, ...] = ()
    """The same at temperature 1, with COUPLED drafts."""

    def __post_init__(self):
        if not self.are_layers(self.feature_layers):
            raise ValueError(
                f"DrafterConfig.feature_layers={self.feature_layers!r}: expected layer numbers from 0, ascending"
            )
        if self.reduced_vocab_size is not None and self.reduced_vocab_size > self.vocab_size:
            raise ValueError(
                f"DrafterConfig.reduced_vocab_size={self.reduced_vocab_size!r}: allowed are 1 to the vocabulary,"
                f" {self.vocab_size}, and None for all"
            )

    @property
    def draft_vocab_size(self) -> int:
        """Columns of the drafter's logits: tokens that may be drafted."""
        return self.vocab_size if self.reduced_vocab_size is None else self.reduced_vocab_size

    @staticmethod
    def are_layers(layers: tuple[int, ...]) -> bool:
        """Whether these are layer numbers, ascending and each once."""
        return list(layers) == sorted(set(layers)) and all(layer >= 0 for layer in layers)

    def check_feature_layers(self, num_layers: int) -> None:
        """Raises a ValueError if the drafter reads a layer that a target of `num_layers` does not have."""
        if self.feature_layers and self.feature_layers[-1] >= num_layers:
            raise ValueError(
                f"feature_layers={list(self.feature_layers)}: this target has layers 0 to {num_layers - 1}"
            )


@settings.dataclass
class TrunkConfig(DrafterConfig):
    """A drafter with a trunk of decoder layers (`models/trunk.py`)."""

    trunk: ClassVar[str] = RECURRENT
    committed_embeddings: ClassVar[bool] = True
    reads_drafts: ClassVar[bool] = False
    """Whether its states depend on drafted tokens, so that a tree costs a pass for each level."""

    _: dataclasses.KW_ONLY
    num_layers: Layers
    num_heads: Count
    num_kv_heads: Count
    head_dim: HeadDim
    intermediate_size: Count
    rope: RopeConfig = RopeConfig()
    window: Count | None = None
    """Positions the trunk sees, its own included; None: all. Rotary positions are relative, so within a window no
    context is longer than those of training."""

    def __post_init__(self):
        super().__post_init__()
        _check_heads(self, "DrafterConfig")
        check_window(self.window, self.num_steps, "DrafterConfig")


def check_window(window: int | None, num_steps: int, where: str) -> None:
    """Raises a ValueError for a window in which a round would not see all it reads and computes itself."""
    if window is not None and window < 2 * num_steps:
        raise ValueError(
            f"{where}.window={window!r}: allowed are 2 * num_steps = {2 * num_steps} and more, so that a round sees"
            " all it reads and computes itself, and null for no window"
        )


_FILLED_IN: Any = None
"""Of a field that was left out."""


@settings.dataclass
class TreeConfig:
    """Shape of the draft tree; a chain is `width=1` with `nodes=depth + 1`.

    Args:
      nodes: nodes of the tree, the root included (N); 8 if left out.
      depth: longest path, in edges (D); 5 if left out.
      width: nodes expanded at each level, and most children of a node; 3 if left out.
      branching: children of every node of each level, the root's first, in place of the three: (3, 2, 1) has 3 nodes
        below the root, then 6, then 6. `width` is then the largest of them.
    Raises:
      ValueError: naming the wrong value and the allowed ones.
    """

    nodes: Annotated[int, Field(ge=2, le=LARGEST_TREE)] = _FILLED_IN
    depth: Count = _FILLED_IN
    width: Count = _FILLED_IN
    branching: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None

    def __post_init__(self):
        given = {name: getattr(self, name) for name in ("nodes", "depth", "width") if getattr(self, name) is not None}
        if self.branching is None:
            self._fill_in({"nodes": 8, "depth": 5, "width": 3} | given)
        else:
            shape = shape_of_branching(self.branching)
            if given and given != shape:  # a record names all three, as they are
                raise ValueError(
                    f"TreeConfig({', '.join(f'{name}={value!r}' for name, value in given.items())}) with"
                    f" branching={self.branching!r}: leave out nodes, depth and width, or branching"
                )
            self._fill_in(shape)
        if self.depth > self.nodes - 1:
            raise ValueError(
                f"TreeConfig.depth={self.depth}: allowed are 1 to nodes - 1 = {self.nodes - 1}; a deeper path"
                " cannot fit into the tree"
            )
        if self.width > self.nodes - 1:
            raise ValueError(f"TreeConfig.width={self.width}: allowed are 1 to nodes - 1 = {self.nodes - 1}")
        available = most_nodes(self.depth, self.width)
        if self.branching is None and available < self.nodes:
            raise ValueError(
                f"TreeConfig(nodes={self.nodes}, depth={self.depth}, width={self.width}): depth and width give at"
                f" most {available - 1} draft nodes; lower nodes to {available} or raise width"
            )

    def _fill_in(self, shape: dict[str, int]) -> None:
        for name, value in shape.items():
            object.__setattr__(self, name, value)

    @classmethod
    def chain(cls, depth: int) -> TreeConfig:
        """The tree of one path of so many draft tokens."""
        return cls(depth + 1, depth, 1)

    @property
    def name(self) -> str:
        """As the command line writes it: "8x5x2" is nodes x depth x width; "3.2.1" and "3." are branchings."""
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
        """Nodes of a level that get children, where these are most."""
        return self.width if self.branching is None else math.prod(self.branching[:-1])

    def level_widths(self) -> tuple[int, ...]:
        """Nodes of each level where the layout is fixed before anything is chosen: if drawn, or of `branching`.

        Without `branching` at least one a level; what is left widens the first levels, which most rounds reach.

        Raises:
          ValueError: if `depth` levels of `width` nodes do not use up `nodes`.
        """
        if self.branching is not None:
            return tuple(math.prod(self.branching[: level + 1]) for level in range(self.depth))
        if self.nodes - 1 > self.depth * self.width:
            raise ValueError(
                f"TreeConfig(nodes={self.nodes}, depth={self.depth}, width={self.width}): a sampled tree has at most"
                f" width nodes a level; lower nodes to {self.depth * self.width + 1} or raise width"
            )
        spare, widths = self.nodes - 1 - self.depth, []
        for _ in range(self.depth):
            extra = min(spare, self.width - 1)
            widths.append(1 + extra)
            spare -= extra
        return tuple(widths)


def shape_of_branching(branching: tuple[int, ...]) -> dict[str, int]:
    """Nodes, depth and width of a tree of `TreeConfig.branching`.

    Raises:
      ValueError: if it gives more nodes than a tree may have.
    """
    nodes = level = 1
    for count in branching:
        level *= count
        nodes += level
        if nodes > LARGEST_TREE:
            raise ValueError(
                f"TreeConfig.branching={settings.shown(branching)}: at most {LARGEST_TREE} nodes are allowed, 1 + the"
                " sum of products"
            )
    return {"nodes": nodes, "depth": len(branching), "width": max(branching)}


def most_nodes(depth: int, width: int) -> int:
    """Nodes of the largest tree of this depth and width, the root included."""
    return 1 + width + (depth - 1) * width**2


@settings.dataclass
class ReuseConfig:
    """What becomes of the states a round leaves over, and under SKIP how many of them a row may draft from alone.

    Args:
      form: one of REUSES.
      min_spares: SKIP only: spare states with which a row drafts without a trunk run; None: as many as the tree is
        deep, or as a round without any accepted token leaves, if these are fewer.
    Raises:
      ValueError: naming the wrong value and the allowed ones.
    """

    form: Reuse = NONE
    min_spares: Count | None = None

    def __post_init__(self):
        if self.min_spares is not None and self.form != SKIP:
            raise ValueError(f"reuse={self}: allowed is {SKIP}:N; no other form takes a number")

    @classmethod
    def parse(cls, text: str) -> ReuseConfig:
        """From "none", "sum", ..., "skip" or "skip:2".

        Raises:
          ValueError: as the class, and for anything that is not of this form.
        """
        form, colon, number = text.partition(":") if isinstance(text, str) else (text, "", "")
        settings.take(Reuse, form, "reuse")
        if not colon:
            return cls(form)
        if not number.isdecimal():
            raise ValueError(f"reuse={text!r}: expected a number of spare states after the colon, as in {SKIP}:2")
        return cls(form, int(number))

    def __str__(self) -> str:
        return self.form if self.min_spares is None else f"{self.form}:{self.min_spares}"

    def num_states(self, depth: int, num_steps: int) -> int:
        """Trunk states of a run (K) for a tree of `depth`: more than the tree is deep where the next rounds need them.

        AHEAD drafts from states that are up to `depth` + 1 tokens old; SKIP takes what the trunk was trained for.
        """
        return {SKIP: num_steps, AHEAD: 2 * depth + 1}.get(self.form, depth)


NO_REUSE = ReuseConfig()


def layer_numbers(config: Any) -> int:
    """Weights of a decoder layer, norms left out."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)


def bucket(n: int, smallest: int = 16) -> int:
    """The next power of two at or above `n`, at least `smallest`: shapes come from few buckets."""
    return max(smallest, 1 << max(0, math.ceil(math.log2(max(n, 1)))))
