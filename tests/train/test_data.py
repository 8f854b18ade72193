"""Documents become rows whose masks name exactly the responses, and batches that come back the same after a restart.

The oracles walk over characters in plain Python. Nothing here is statistical, and no model runs.
"""

from __future__ import annotations

import dataclasses
import gzip
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from hsd_jax.train import data, documents
from hsd_jax.train.documents import Document, to_document
from hsd_jax.train.rows import Rows, encoded, make_rows, spoken
from hsd_jax.train.tokenizer import train_tokenizer

BOS, EOS = 0, 1
RECORDS = [
    {"question": "How many?", "answer": "Two <<1+1=2>>and\n#### 2"},
    {"prompt": "the cat sat on the ", "response": "mat and the dog ran"},
    {"turns": [["U", "the dog?"], ["S", "a dog"], ["U", "and the cat?"], ["S", "the cat ran"], ["U", "the end"]]},
    {"messages": [{"role": "assistant", "content": "the mat"}, {"role": "user", "content": "a dog ran"}]},
    {"text": "the dog ran and the cat sat"},
    {"prompt": "the caf", "response": "é ☃ ran"},
]
SAID = [
    [" Two and\nThe answer is 2."],
    ["mat and the dog ran"],
    [" a dog\n", " the cat ran\n"],
    [" the mat\n"],
    [],
    ["é ☃ ran"],
]
ENDS_WITH_RESPONSE = [True, True, False, False, False, True]
"""Whether the end token behind the document belongs to a response."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE that merges whole words, with a chat template, and the records as a file."""
    root = tmp_path_factory.mktemp("data")
    (root / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    (root / "words.txt").write_text("the cat sat on the mat and the dog ran\n" * 20)
    train_tokenizer([str(root / "words.txt"), str(root / "data.jsonl")], 310, root)
    (root / "config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    return root


@pytest.fixture(scope="module")
def tokenizer(folder):
    found, bos, eos = data.read_tokenizer(folder)
    assert (bos, eos) == (BOS, EOS)
    return found


def rows_of(tokenizer, docs, length=8, seed=0, loss_on="all", eos=EOS, vocab_size=310) -> Rows:
    return make_rows(list(encoded(docs, tokenizer, BOS, eos, vocab_size, loss_on == "responses")), length, seed)


def stream_of(rows: Rows) -> list[tuple[int, bool]]:
    """The tokens and labels of packed rows, in one piece."""
    pairs = [(int(rows.tokens[0, 0]), False)]
    for tokens, mask in zip(rows.tokens, rows.mask, strict=True):
        pairs += zip(tokens[1:].tolist(), mask[1:].tolist(), strict=True)
    return pairs


def labelled(tokenizer, docs) -> str:
    """The text of the labels."""
    pairs = stream_of(rows_of(tokenizer, docs, 1, loss_on="responses"))
    return tokenizer.decode([token for token, is_label in pairs if is_label], skip_special_tokens=False)


def test_packed_rows_are_those_of_the_first_trainer(tokenizer):
    """Cut from one stream in plain Python, in the order of the seed."""
    texts = [to_document(r, "-").text for r in RECORDS]
    stream: list[int] = []
    for i in np.random.default_rng(5).permutation(len(texts)):
        stream += [BOS, *tokenizer.encode(texts[i], add_special_tokens=False).ids, EOS]
    want = [stream[i : i + 9] for i in range(0, len(stream) - 8, 8)]
    rows = rows_of(tokenizer, [Document("-", t) for t in texts], 8, seed=5)
    assert rows.tokens.tolist() == want
    assert rows.tokens.dtype == np.int32 and rows.num_tokens == len(stream)
    begins = [i for i, token in enumerate(stream) if token == BOS]  # of each document; nothing there stands before it
    for number, (row, mask, starts) in enumerate(zip(rows.tokens, rows.mask, rows.starts, strict=True)):
        for i, at in enumerate(range(8 * number, 8 * number + 9)):
            begin = max(b for b in begins if b <= at)
            assert starts[i] == max(begin - 8 * number, 0) and mask[i] == (i > 0 and at != begin), (row, i)
    masked = rows_of(tokenizer, [to_document(r, "-") for r in RECORDS], 8, seed=5, loss_on="responses")
    assert masked.tokens.tolist() == want
    assert masked.fingerprint == rows.fingerprint != rows_of(tokenizer, [Document("-", t) for t in texts]).fingerprint
    # Where documents begin decides what a run sees; rows of one document each are those of earlier runs.
    assert rows.fingerprint != dataclasses.replace(rows, starts=None).fingerprint
    whole = rows_of(tokenizer, [Document("-", " ".join(texts))], 8)
    assert whole.starts is None and set(whole.take(slice(2))) == {"tokens", "mask"}


@pytest.mark.parametrize("index", range(len(RECORDS)))
def test_masks_name_the_tokens_that_hold_a_character_of_a_response(tokenizer, index):
    document = to_document(RECORDS[index], "-")
    assert [document.text[a:b] for a, b in document.responses] == SAID[index]
    wanted = set().union(*(range(a, b) for a, b in document.responses), set())
    expected, done = [False], 0  # the start token
    text = document.text.encode()
    characters = [i for i, c in enumerate(document.text) for _ in c.encode()]  # of each byte
    for token in tokenizer.encode(document.text, add_special_tokens=False).ids:
        # A byte-level token spells each byte by one character of its own alphabet.
        num = len(tokenizer.id_to_token(token))
        expected.append(any(characters[i] in wanted for i in range(done, done + num)))
        done += num
    assert done == len(text)
    expected.append(ENDS_WITH_RESPONSE[index])
    if not any(expected):
        with pytest.raises(ValueError, match=r"loss_on=responses.* from -"):
            rows_of(tokenizer, [document], 1, loss_on="responses")
        return
    packed = rows_of(tokenizer, [document], 1, loss_on="responses")
    assert [label for _, label in stream_of(packed)] == expected


def test_a_token_across_the_border_is_a_label():
    """The whole text is tokenised, so the border may lie inside a token; offsets give it to the response."""
    letters = {c: i for i, c in enumerate(["<s>", "</s>", "x", "a", "b", "c", "ab"])}
    merging = Tokenizer(models.BPE(letters, [("a", "b")]))
    merging.add_special_tokens(["<s>", "</s>"])
    ids = merging.encode("xa", add_special_tokens=False).ids + merging.encode("bc", add_special_tokens=False).ids
    document = to_document({"prompt": "xa", "response": "bc"}, "-")
    rows = rows_of(merging, [document], 4, loss_on="responses")
    assert rows.tokens.tolist() == [[0, letters["x"], letters["ab"], letters["c"], 1]]
    assert len(ids) == 4  # segments would be other tokens than the whole
    assert rows.mask.tolist() == [[False, False, True, True, True]]
    early = rows_of(merging, [dataclasses.replace(document, responses=((3, 4),))], 4, loss_on="responses")
    assert early.mask.tolist() == [[False, False, False, True, True]]


def chatml(turns, is_open: bool) -> str:
    text = "".join(f"<s>{who}\n{said}</s>\n" for who, said in turns)
    return text + "<s>assistant\n" * is_open


def qwen3(turns, is_open: bool) -> str:
    """The last answer shows that it thought; answers before it do not."""
    turns = list(turns)
    if turns and turns[-1][0] == "assistant":
        turns[-1] = ("assistant", f"<think>\n{turns[-1][1]}")
    return chatml(turns, is_open)


TURNS = [("user", "the cat?"), ("assistant", "the dog"), ("user", "a mat?"), ("assistant", "the mat")]
CHAT = {"messages": [{"role": who, "content": said} for who, said in TURNS]}


def test_a_chat_template_marks_answers_and_the_ends_of_their_turns(tokenizer):
    document = to_document(CHAT, "-", chatml)
    assert document.text == chatml(TURNS, False)
    assert labelled(tokenizer, [document]) == "the dog</s>the mat</s>"
    tokens = [token for token, _ in stream_of(rows_of(tokenizer, [document], 1))]
    assert tokenizer.decode(tokens, skip_special_tokens=False) == document.text  # neither start nor end token was added
    assert labelled(tokenizer, [to_document(CHAT, "-", qwen3)]) == "the dog</s><think>\nthe mat</s>"


def test_speakers_of_all_names_are_roles_to_a_template():
    template = documents.chat_template_of(lambda messages, is_open: f"{[m['role'] for m in messages]} {is_open}")
    turns = [("system", "a"), ("human", "b"), ("S", "c"), ("U", "d"), ("gpt", "e")]
    assert template(turns, True) == "['system', 'user', 'assistant', 'user', 'assistant'] True"
    pairs = [["user", "Hi."], {"role": "assistant", "content": "Hello,\nyou."}, {"from": "human", "value": "Bye."}]
    assert to_document({"turns": pairs}, "-").text == "User: Hi.\nAssistant: Hello, you.\nUser: Bye."


def test_a_template_without_ends_of_turns_gets_an_end_token(folder, tokenizer):
    template = data.template_of(folder)
    document = to_document(CHAT, "-", template)
    assert document.text == "<s>User: the cat?\nAssistant: the dog\nUser: a mat?\nAssistant: the mat\n"
    assert labelled(tokenizer, [document]) == " the dog\n the mat\n</s>"
    assert [token for token, _ in stream_of(rows_of(tokenizer, [document], 1))][:2].count(BOS) == 1
    (folder / "bare").mkdir()
    (folder / "bare" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert data.template_of(folder / "bare") is None


def test_a_template_that_rewrites_or_refuses_is_named(tmp_path):
    (tmp_path / "chat.jsonl").write_text("\n" + json.dumps(CHAT) + "\n")

    def summary(turns, is_open):
        return f"{len(turns)} turns" + chatml(turns, is_open)

    with pytest.raises(ValueError, match=r"chat\.jsonl:2: .*turn 2"):
        documents.load_documents(tmp_path / "chat.jsonl", summary)
    assert documents.load_documents(tmp_path / "chat.jsonl", summary, find_responses=False)[0].responses == ()


def sampled(tokenizer, prompt: list[int], response: list[int]) -> dict:
    text = tokenizer.decode(prompt)
    record = {"prompt": text, "response": spoken(tokenizer.decode, prompt, response)}
    return record | {"prompt_tokens": prompt, "response_tokens": response}


def test_sampled_tokens_are_not_tokenised_again(tokenizer):
    the = [tokenizer.token_to_id(c) for c in "the"]  # no text is tokenised like this
    prompt = [BOS, *tokenizer.encode("a cat", add_special_tokens=False).ids]
    ended, cut = sampled(tokenizer, prompt, [*the, EOS]), sampled(tokenizer, prompt, the)
    assert ended["response"] == cut["response"] == "the"
    for record, last in ((ended, True), (cut, False)):  # a response that was cut off did not end
        document = to_document(record, "-")
        rows = rows_of(tokenizer, [document], len(prompt) + 3, loss_on="responses")
        assert rows.tokens.tolist() == [[*prompt, *the, EOS]] and rows.num_tokens == len(prompt) + 4
        assert rows.mask.tolist() == [[False] * len(prompt) + [True] * 3 + [last]]
        every = rows_of(tokenizer, [document], len(prompt) + 3)
        assert every.mask.tolist() == [[False] + [True] * (len(prompt) + 2) + [last]]
    again = {k: v for k, v in ended.items() if "tokens" not in k}
    assert rows_of(tokenizer, [to_document(again, "-")], 3).tokens.tolist() != [[*prompt, *the, EOS]]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"response": "a dog"}, r"f:1: response_tokens"),
        ({"response_tokens": [2, 400]}, r"f:1: response_tokens"),
        ({"prompt_tokens": None}, r"^prompt_tokens=None: .*list"),
    ],
)
def test_sampled_tokens_of_another_target(tokenizer, changes, message):
    record = sampled(tokenizer, [BOS, 5, 6], [7, 8]) | changes
    with pytest.raises(ValueError, match=message):
        rows_of(tokenizer, [to_document(record, "f:1")], 2)


def test_files_become_rows(folder, tmp_path):
    path = folder / "data.jsonl"
    with gzip.open(tmp_path / "data.jsonl.gz", "wb") as out:
        out.write(path.read_bytes())
    config = data.DataConfig(loss_on="responses")
    rows = data.read_rows([path], folder, 16, 3, 310, config)
    assert data.read_rows([tmp_path / "data.jsonl.gz"], folder, 16, 3, 310, config).fingerprint == rows.fingerprint
    plain = data.read_rows([path], folder, 16, 3, 310, dataclasses.replace(config, chat_template=False))
    assert plain.fingerprint != rows.fingerprint
    own = data.read_rows([path], folder, 16, 7, 310, dataclasses.replace(config, seed=3))
    assert own.fingerprint == rows.fingerprint != data.read_rows([path], folder, 16, 7, 310, config).fingerprint
    with pytest.raises(ValueError, match=r"words\.txt: .*token \d+.* 256 "):
        data.read_rows([folder / "words.txt"], folder, 16, 3, 256)
    with pytest.raises(ValueError, match=r"loss_on=responses.* from .*words\.txt"):
        data.read_rows([folder / "words.txt"], folder, 16, 3, 310, config)


# Batches.


def numbered(num: int = 7, length: int = 3) -> Rows:
    tokens = np.arange(num * (length + 1), dtype=np.int32).reshape(num, length + 1)
    return Rows(tokens, tokens % 3 > 0, num, tokens.size)


class Doubled:
    """Features that tell which rows they are of."""

    def take(self, index):
        return {"hidden": np.stack([np.full((3, 2), row, np.float32) for row in index])}


def same(a: dict, b: dict) -> bool:
    return set(a) == set(b) and all((a[k] == b[k]).all() and a[k].dtype == b[k].dtype for k in a)


def test_batches_follow_the_order_of_seed_and_epoch():
    rows = numbered()
    first = data.Batches(rows, 2, seed=4)
    order = [np.random.default_rng((4, epoch)).permutation(7)[:6].reshape(3, 2) for epoch in range(4)]
    for at in np.concatenate(order)[:10]:  # epochs of three batches, a row left out of each
        batch, tokens = next(first), rows.tokens[at]
        assert batch["tokens"].tolist() == tokens.tolist()
        assert batch["mask"].tolist() == (tokens % 3 > 0).tolist()
        assert set(batch) == {"tokens", "mask"}


@pytest.mark.parametrize("features", [None, Doubled()], ids=["memory", "features"])
def test_a_stored_state_gives_the_same_batches(features):
    rows = numbered()
    whole = data.Batches(rows, 2, seed=1, features=features)
    seen, states = [], []
    for _ in range(9):
        states.append(json.dumps(whole.get_state()))
        seen.append(next(whole))
    if features is not None:
        assert all((b["hidden"][:, 0, 0] == b["tokens"][:, 0] // 4).all() for b in seen)
    again = data.Batches(rows, 2, seed=1, features=features)
    for start in (4, 0, 8, 3):  # one iterator goes back and forth
        again.set_state(json.loads(states[start]))
        assert again.get_state()["step"] == start
        for want in seen[start:]:
            assert same(next(again), want)


def test_processes_share_a_batch():
    rows = numbered(11)
    whole = data.Batches(rows, 4, seed=2)
    parts = [data.Batches(rows, 4, 2, (p, 2)) for p in range(2)]
    for _ in range(5):
        got = [next(p) for p in parts]
        assert [len(g["tokens"]) for g in got] == [2, 2]
        assert np.concatenate([g["tokens"] for g in got]).tolist() == next(whole)["tokens"].tolist()
    parts[1].set_state(whole.get_state())  # from one process to two
    assert next(parts[1])["tokens"].tolist() == next(whole)["tokens"][2:].tolist()


def test_a_state_of_other_data_is_refused():
    mine = data.Batches(numbered(), 2, seed=1)
    for rows, batch, seed in ((numbered(), 2, 5), (numbered(), 3, 1), (numbered(8), 2, 1)):
        with pytest.raises(ValueError, match="the checkpoint has"):
            mine.set_state(data.Batches(rows, batch, seed).get_state())
