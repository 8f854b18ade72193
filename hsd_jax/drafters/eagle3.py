"""The EAGLE-3 drafter, whose weights others trained (arXiv:2503.01840; EAGLE-3.1 adds norms).

As `eagle.py` it computes the state after a node from its parent's state and its own token. It differs in
what it reads and says: three or more layers of the target through one product `fc`, once for each committed token; the
embedding beside the state in the attention of its first layer; and a head of its own, often over a reduced draft
vocabulary. The switches have the names of speculators' class.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hsd_jax import validation
from hsd_jax.config import SLIDING, FeatureLayer, ModelConfig, Steps, TreeConfig, TrunkConfig, weights_of_layer
from hsd_jax.drafters.eagle import drafter_of_levels
from hsd_jax.drafters.method import DraftingMethod, PublishedKind, planning_of_trained
from hsd_jax.drafters.published import Published, config_of
from hsd_jax.drafters.trunk_state import TrunkInputs
from hsd_jax.kernels.ops import embed, matmul, rms_norm
from hsd_jax.models.convert import PLAIN_MODULES
from hsd_jax.models.hf_config import parse_config
from hsd_jax.models.mask_block import normed
from hsd_jax.models.tensor_files import file_name
from hsd_jax.models.trunk import init_trunk
from hsd_jax.types import Drafter, DrawScheme, Weights
from hsd_jax.validation import Count, shown


@validation.dataclass
class Eagle3Config(TrunkConfig):
    """An EAGLE-3 head. `hidden_size` is its own width, and `vocab_size` that of its target."""

    kind: ClassVar[str] = "eagle3"
    reads_drafts: ClassVar[bool] = True
    pairs_in_attention: ClassVar[bool] = True

    _: dataclasses.KW_ONLY
    num_steps: Steps = 15
    """The deepest tree that is drafted. The recurrence has no length of its own."""
    feature_layers: tuple[FeatureLayer, ...] = ()
    target_hidden_size: Count
    has_embedding: bool = False
    """Whether it has embeddings of its own. If not, it reads those of its target."""
    fc_norm: bool = False
    """Whether each layer's feature is normalised before `fc`."""
    norm_before_fc: bool = False
    """Whether all of them together are."""
    norm_before_residual: bool = False
    """Whether what follows is added to the normalised state, and not to the state."""
    norm_output: bool = False
    """Whether the next step reads the normalised state (3.1), and not the state."""
    activation: str = "silu"
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("Eagle3Config: fc_norm and norm_before_fc: allowed is one of them")
        if not self.has_embedding and self.hidden_size != self.target_hidden_size:
            width = f"hidden_size={self.hidden_size}, the target's is {self.target_hidden_size}"
            raise ValueError(f"Eagle3Config: {width}: without embeddings of its own (embed_tokens) both must be equal")


def init_weights(key: jax.Array, config: Eagle3Config) -> Weights:
    """Random float32 weights. With a reduced draft vocabulary they lack `draft_to_target`."""
    num, width = len(config.feature_layers), config.hidden_size
    norm = lambda size: {"weight": jnp.ones(size)}  # noqa: E731
    matrix = lambda part, *shape: jax.random.normal(jax.random.fold_in(key, part), shape) * shape[-1] ** -0.5  # noqa: E731
    fusion: Weights = {"kernel": matrix(1, width, num * config.target_hidden_size)}
    if config.fc_norm:
        fusion |= {"norms": {str(i): norm(config.target_hidden_size) for i in range(num)}}
    if config.norm_before_fc:
        fusion |= {"norm": norm(num * config.target_hidden_size)}
    weights = {"fusion": fusion, "trunk": init_trunk(key, config), "output_norm": norm(width)}
    weights |= {"head": matrix(2, config.draft_vocab_size, width)}
    return weights | ({"embedding": matrix(3, config.vocab_size, width)} if config.has_embedding else {})


def fuse(models, config: Eagle3Config, _, features: tuple[Float[Array, "... H"], ...]) -> Float[Array, "... h"]:
    """The state that stands for a committed position, from the target's features of it."""
    own = models["drafter"]["fusion"]
    if config.fc_norm:
        features = tuple(normed(own["norms"][str(i)], config, x) for i, x in enumerate(features))
    joined = jnp.concatenate(features, -1)
    if config.norm_before_fc:
        joined = normed(own["norm"], config, joined)
    return matmul(joined, own["kernel"])


def embed_tokens(models, target_config: ModelConfig, config: Eagle3Config, tokens: Array) -> Array:
    """The embeddings of tokens. The norm behind them undoes a factor, so that of the target is left out."""
    return embed(models["drafter" if config.has_embedding else "target"]["embedding"], tokens)


def eagle3_drafter(
    target_config: ModelConfig, config: Eagle3Config, tree: TreeConfig, cache_dtype: Any, scheme: DrawScheme
) -> Drafter:
    """The `Drafter`. It costs what that of `eagle.py` costs, with a head of its own and `fc` once per round."""

    def say(models, states: Float[Array, "B w h"]) -> tuple[Array, Array]:
        own = models["drafter"]
        if config.norm_output:
            states = rms_norm(states, own["output_norm"]["weight"], config.norm_eps)
            return matmul(states, own["head"]), states
        return matmul(normed(own["output_norm"], config, states), own["head"]), states

    inputs = TrunkInputs(embed_tokens, fuse)
    return drafter_of_levels(target_config, config, tree, cache_dtype, scheme, say, inputs)


def drafting_seconds(model: Any, config: Eagle3Config, rows: int, tree: TreeConfig) -> float:
    """`fc`, and for every level a pass of the layers and a product with the head."""
    positions, width = rows * tree.most_expanded, config.hidden_size
    wider = width * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim  # attention reads twice the width
    layers = config.num_layers * weights_of_layer(config) + wider
    level = model.product(layers, positions) + model.product(config.draft_vocab_size * width, positions)
    fusion = model.product(width * len(config.feature_layers) * config.target_hidden_size, rows)
    return float(fusion) + tree.depth * (float(level) + model.layers(config) + 10 * model.rates.operation_seconds)


def parse(published: Published, target_config: ModelConfig) -> Eagle3Config:
    """As `PublishedKind.parse`. A missing switch is off, as in speculators' class."""
    where, keys = str(published.config_file), published.layers
    own = parse_config(keys, where)
    switches = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
    on = {name: published.switch(name, bool, False) for name in switches}
    if own.sliding_window is not None or (
        published.format == "speculators" and SLIDING in (keys.get("layer_types") or ())
    ):
        raise ValueError(f"{where}: layer_types={shown(keys.get('layer_types'))}: allowed is full_attention")
    on["target_hidden_size"] = target_config.hidden_size
    return config_of(published, Eagle3Config, own, target_config, **on)


_OUTER = {
    "fusion.kernel": "fc.weight",
    "fusion.norm.weight": "input_norm.weight",
    "output_norm.weight": "norm.weight",
    "head": "lm_head.weight",
    "embedding": "embed_tokens.weight",
}


def named(path: str, config: Eagle3Config) -> str:
    """As `PublishedKind.named`."""
    if path.startswith("fusion.norms."):
        return path.replace("fusion.norms", "fc_norm")
    return file_name(path.removeprefix("trunk."), _OUTER, "layers", PLAIN_MODULES | {"hidden_norm": "hidden_norm"})


EAGLE3 = DraftingMethod(
    Eagle3Config,
    eagle3_drafter,
    planning_of_trained(drafting_seconds),
    published=PublishedKind(parse, init_weights, named),
)
