"""What may be asked of `load`, and what may be added to the models that it gives. jax is not needed to read this.

The command line and files of methods (`lab/bench/methods.py`) take these fields, by these names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hsd_jax.config import Precision, Quantized
from hsd_jax.settings import Count, NotNegative, OneOf, dataclass

DTYPES = ("float32", "bfloat16")
Name = Annotated[str, Field(title="NAME")]
Folder = Annotated[str, Field(title="DIR")]


@dataclass
class Loading:
    """Arguments of `load`, which explains them at length."""

    target: Name | None = None
    """demo; smollm2; a Hugging Face folder; a GGUF file; or ORG/NAME on the Hugging Face hub."""
    revision: Annotated[str, Field(title="REV")] | None = None
    """Branch, tag or commit of ORG/NAME (default: its main branch)."""
    tokenizer: Name | None = None
    """The model whose tokenizer and chat template to take, named as the target is (default: the target's own)."""
    drafter: Name | None = None
    """A folder of `hsd train drafter`, or ORG/NAME of one on the hub; another language model, named as a target is;
    lookup, or lookup:MIN-MAX, for n-grams of the context; FOLDER+lookup for both in one tree (default: that of demo or
    smollm2; for other targets plain decoding)."""
    strict: bool = False
    """Refuse a drafter that was trained for other weights of the same sizes; by default it drafts with a warning."""
    dtype: Annotated[str, OneOf(DTYPES)] | None = None
    """Dtype of the target's weights (default: that of the checkpoint)."""
    quantize: Quantized | None = None
    """int8 stores 8 bits per weight (on CPUs activations too); this is another target, close to the original."""
    precision: Precision = "fast"
    """exact is float32 and highest matmul precision, with which speculation changes no token on one device."""
    mesh: Annotated[str, Field(title="SPEC")] | None = None
    """Devices, for example "data=2,model=4" (default: one device)."""
    max_len: Annotated[Count, Field(title="TOKENS")] | None = None
    """Most tokens of prompt and answer together (default: the model's limit)."""


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
