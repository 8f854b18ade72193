"""Trains a byte-level BPE tokenizer for a new target and writes it as a Hugging Face `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from hsd_jax.host.files import write_json, write_text
from hsd_jax.train.documents import load_documents
from hsd_jax.train.journal import Report

BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ 'User' if m['role'] == 'user' else 'Assistant' }}: "
    "{{ m['content'].split() | join(' ') }}\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def train_tokenizer(
    files: Sequence[str | Path], vocab_size: int, out: str | Path, skip: Report | None = None
) -> Tokenizer:
    """Learns a byte-level BPE of `vocab_size` on the documents of `files` and writes it into the folder `out`."""
    documents = [document.text for file in files for document in load_documents(file, skip=skip)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", settings)
    write_text(out / "tokenizer.json", tokenizer.to_str(pretty=True))  # last: it says that both are there
    return tokenizer
