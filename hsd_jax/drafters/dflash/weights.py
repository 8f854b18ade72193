"""Configuration and weights of DFlash and DSpark drafters, and how they are read from the files of others."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from hsd_jax import validation
from hsd_jax.config import ACTIVATIONS, FULL, SLIDING, FeatureLayer, LayerType, ModelConfig, TrunkConfig
from hsd_jax.drafters.method import PublishedKind
from hsd_jax.drafters.published import Published, config_of
from hsd_jax.models.convert import PLAIN_MODULES
from hsd_jax.models.hf_config import parse_config
from hsd_jax.models.tensor_files import file_name
from hsd_jax.models.trunk import init_trunk
from hsd_jax.types import Weights
from hsd_jax.validation import AtLeastTwo, Count, OneOf, Whole

VANILLA, GATED, RNN = MARKOV_HEADS = ("vanilla", "gated", "rnn")
"""What a Markov head reads: the previous token; also the state; or also its own memory of the path."""
NONE, STATE, TOKEN = CONFIDENCES = ("none", "state", "token")
"""What the confidence head reads: nothing, as there is none; the state; or the state and the previous token."""


@validation.dataclass
class DFlashConfig(TrunkConfig):
    """A block that predicts `num_steps` tokens."""

    kind: ClassVar[str] = "dflash"
    committed_embeddings: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = True

    _: dataclasses.KW_ONLY
    feature_layers: tuple[FeatureLayer, ...] = ()
    """As in `DrafterConfig`; -1 is the embedding. At least one."""
    mask_token: Whole
    """The token of the slots after the anchor."""
    samples_anchor: bool = False
    """Whether the anchor's slot predicts the first draft. If not, the first mask slot does."""
    activation: Annotated[str, OneOf(ACTIVATIONS)] = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    layer_types: tuple[LayerType, ...] = ()
    """SLIDING or FULL for each layer. Empty: all are FULL."""
    sliding_window: Count | None = None
    """The number of positions before the anchor that a SLIDING layer sees."""
    sees_ahead: bool = False
    """Whether the slots of a SLIDING layer see later slots. Those of a FULL layer always do."""
    rank: Whole = 0
    """Rank of the Markov head. 0: there is none, as in DFlash."""
    markov_head: Annotated[str, OneOf(MARKOV_HEADS)] = VANILLA
    confidence: Annotated[str, OneOf(CONFIDENCES)] = NONE
    has_embedding: bool = False
    """Whether it has embeddings of its own. If not, it reads those of its target."""
    has_head: bool = False
    """Whether it has an LM head of its own."""

    def __post_init__(self):
        super().__post_init__()
        if self.mask_token >= self.vocab_size:
            raise ValueError(f"DFlashConfig.mask_token={self.mask_token}: allowed are 0 to {self.vocab_size - 1}")
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ValueError("DFlashConfig.sliding_window=None: some of layer_types are sliding")
        if self.confidence == TOKEN and self.rank == 0:
            raise ValueError(f"DFlashConfig.confidence={TOKEN!r} with rank=0: allowed are {NONE!r} and {STATE!r}")

    @property
    def first_slot(self) -> int:
        """The slot that predicts the first draft."""
        return 0 if self.samples_anchor else 1

    @property
    def block_size(self) -> int:
        """The number of slots, the anchor included."""
        return self.num_steps + self.first_slot

    def layer_type(self, layer: int) -> str:
        return self.layer_types[layer] if self.layer_types else FULL


_LLAMA = {"head_dim": None, "num_key_value_heads": None, "max_position_embeddings": 2048, "sliding_window": None}
"""What a Llama configuration means where it lacks a key."""


def parse(published: Published, target_config: ModelConfig) -> DFlashConfig:
    """As `PublishedKind.parse`. A missing switch has the default of speculators' class, or what its tensors say."""
    where, switch, tensors = str(published.config_file), published.switch, published.tensors
    layers = published.layers
    if layers["model_type"] == "llama":
        layers = _LLAMA | layers | {"model_type": "qwen3", "use_sliding_window": True}
    own = parse_config(layers, where)
    if own.hidden_size != target_config.hidden_size:
        raise ValueError(f"{where}: hidden_size={own.hidden_size}: allowed is the target's {target_config.hidden_size}")
    is_dspark = any(name.startswith(("markov_head.", "confidence_head.")) for name in tensors)
    is_dspark |= "dspark" in (published.switches.get(name) for name in ("speculators_model_type", "projector_type"))
    samples_anchor = switch("sample_from_anchor", bool, is_dspark)
    proj, rows = (tensors.get(f"{name}.weight") for name in ("confidence_head.proj", "markov_head.markov_w1"))
    width_of = lambda tensor: 0 if tensor is None else math.prod(tensor.shape[-1:])  # noqa: E731
    rank = switch("markov_rank", Whole, width_of(rows)) if is_dspark else 0
    confidence = NONE
    if is_dspark and switch("enable_confidence_head", bool, proj is not None):
        reads_token = switch("confidence_head_with_markov", bool, width_of(proj) > own.hidden_size)
        confidence = TOKEN if reads_token else STATE
    return config_of(
        published,
        DFlashConfig,
        own,
        target_config,
        num_steps=switch("block_size", AtLeastTwo, None) - (0 if samples_anchor else 1),
        mask_token=switch("mask_token_id", Whole, None),
        samples_anchor=samples_anchor,
        sees_ahead=switch("sliding_window_non_causal", bool, published.format != "speculators"),
        rank=rank,
        markov_head=switch("markov_head_type", Annotated[str, OneOf(MARKOV_HEADS)], VANILLA),
        confidence=confidence,
        has_head="lm_head.weight" in tensors,
    )


def init_weights(key: jax.Array, config: DFlashConfig) -> Weights:
    """Random float32 weights. With a reduced draft vocabulary they lack `draft_to_target`."""
    width, rank, columns = config.hidden_size, config.rank, config.draft_vocab_size
    norm, keys = {"weight": jnp.ones(width)}, iter(jax.random.split(key, 9))
    matrix = lambda *shape: jax.random.normal(next(keys), shape) * shape[-1] ** -0.5  # noqa: E731
    linear = lambda *shape: {"kernel": matrix(*shape), "bias": jnp.zeros(shape[0])}  # noqa: E731
    weights: Weights = {"context": {"kernel": matrix(width, len(config.feature_layers) * width), "norm": norm}}
    weights |= {"trunk": init_trunk(next(keys), config), "output_norm": norm}
    if config.rank:
        weights["injector"] = {"previous": matrix(config.vocab_size, rank), "bias": matrix(columns, rank)}
        if config.markov_head != VANILLA:
            size = (3 * rank, 2 * rank + width) if config.markov_head == RNN else (rank, rank + width)
            weights["injector"]["reader"] = linear(*size)
    if config.confidence != NONE:
        weights["confidence"] = linear(1, width + (rank if config.confidence == TOKEN else 0))
    if config.has_embedding:
        weights["embedding"] = matrix(config.vocab_size, width)
    if config.has_head:
        weights["head"] = matrix(columns, width)
    return weights


_OUTER = {
    "context.kernel": "fc.weight",
    "context.norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "injector.previous": "markov_head.markov_w1.weight",
    "injector.bias": "markov_head.markov_w2.weight",
    "confidence.kernel": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
    "embedding": "embed_tokens.weight",
    "head": "lm_head.weight",
}


def named(path: str, config: DFlashConfig) -> str:
    """As `PublishedKind.named`."""
    if path.startswith("injector.reader."):
        leaf = "bias" if path.endswith("bias") else "weight"
        return f"markov_head.{'joint' if config.markov_head == RNN else 'gate'}_proj.{leaf}"
    return file_name(path.removeprefix("trunk."), _OUTER, "layers", PLAIN_MODULES)


PUBLISHED = PublishedKind(parse, init_weights, named, ("head", "injector.bias"))
