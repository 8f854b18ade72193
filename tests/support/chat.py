"""Checkpoints with chat templates: the tokenizer of every folder here puts a start token before a text by itself."""

from __future__ import annotations

import json
from pathlib import Path

from hsd_jax.models import convert
from support import toy

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot_id|>")
BOS = 0
_ROLES = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|> {% endfor %}"

CHATML = "{{ bos_token }}" + _ROLES + "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|end|> {{ m['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|> {% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}user {{ m['content'] }} assistant"
    "{% else %} {{ m['content'] }} </s>{% endif %}{% endfor %}"
)
THINKING = (  # writes more before the last answer than a prompt shows, as Qwen3's does
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }} {% if loop.last and m['role'] == 'assistant' %}"
    "brief {% endif %}{{ m['content'] }}<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant "
    "{% endif %}"
)
LINES = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
SPLITTING = (  # drops what stands before the last answer, as Qwen3's and DeepSeek's do
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }} {% if '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[-1].lstrip() }}{% else %}{{ m['content'] }}{% endif %}<|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
TOJSON = "{{ bos_token }}{{ messages | tojson }}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
AGENT = (  # tools, calls, reasoning and a switch, as Qwen's; it leaves out the roles that it does not know
    "{%- macro say(who, text) %}{{ '<|im_start|>' + who + ' ' + text + '<|im_end|> ' }}{%- endmacro %}"
    "{{- bos_token }}{%- if tools %}{{- say('system', 'call <' + (tools | tojson) + '>') }}{%- endif %}"
    "{%- for m in messages %}{%- set text = m.content if m.content is string else '' %}"
    "{%- if m.content is not string and m.content is iterable %}{%- set ns = namespace(text='') %}"
    "{%- for part in m.content %}{%- set ns.text = ns.text + part.text %}{%- endfor %}{%- set text = ns.text %}"
    "{%- endif %}{%- if m.role in ('user', 'system') %}{{- say(m.role, text) }}{%- elif m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant ' }}{%- if m.reasoning_content %}{{- '<' + m.reasoning_content + '>' }}{%- endif %}"
    "{{- text }}{%- for call in m.tool_calls or [] %}{{- call.function.name + (call.function.arguments | tojson) }}"
    "{%- endfor %}{{- '<|im_end|> ' }}{%- elif m.role == 'tool' %}{{- say('user', 'got ' + text) }}{%- endif %}"
    "{%- endfor %}{%- if name is defined %}{{- name }}{%- endif %}{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant ' }}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think></think>' }}{%- endif %}{%- endif %}"
)
PARTS = (  # trims, reads lists of parts, and wants roles to alternate, as Gemma's
    "{{ bos_token }}{%- if messages[0].role == 'system' -%}{%- set rest = messages[1:] -%}"
    "{%- set first = messages[0].content -%}{%- else -%}{%- set rest = messages -%}{%- set first = '' -%}{%- endif -%}"
    "{%- for m in rest -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{{ '<|start|>' + ('model' if m.role == 'assistant' else m.role) + ' ' + (first if loop.first else '') }}"
    "{%- if m.content is string -%}{{ m.content | trim }}{%- elif m.content is iterable -%}"
    "{%- for part in m.content -%}{%- if part.type == 'text' -%}{{ part.text | trim }}{%- endif -%}{%- endfor -%}"
    "{%- else -%}{{ raise_exception('no content') }}{%- endif -%}{{ '<|end|> ' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start|>model ' }}{%- endif -%}"
    "{%- if tools or enable_thinking -%}{{ tools }}{%- endif -%}"
)
DATED = (  # variables with defaults, a call as the last word, and a tag of transformers, as Llama's
    "{{ bos_token }}{%- if not date is defined %}{%- set date = '26 Jul' %}{%- endif %}"
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{- '<|start|>system<|end|> ' + date }}"
    "{%- if tools is not none %}{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{%- endif %}"
    "{{- '<|eot_id|>' }}{%- for m in messages %}{{- '<|start|>' + m.role + '<|end|> ' }}{% generation %}"
    "{%- if m.tool_calls %}{{- m.tool_calls[0].function.arguments | tojson }}"
    "{%- elif m.content is string %}{{- m.content | trim }}{%- else %}"
    "{%- for part in m.content %}{{- part.text }}{%- endfor %}{%- endif %}{{- '<|eot_id|>' }}{% endgeneration %}"
    "{%- endfor %}{%- if enable_thinking is defined %}{{- 'fast' }}{%- endif %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|> ' }}{%- endif %}"
)
REFUSING = "{{ raise_exception('roles must alternate') }}"


def byte_glyphs() -> list[str]:
    """The character that a byte-level tokenizer writes for each byte."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return [chr(byte) if byte in own else chr(256 + others.index(byte)) for byte in range(256)]


def write_tokenizer(folder: Path, template: str | None) -> Path:
    """A tokenizer whose tokens are single characters, with a chat template; None: without."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]  # a blank, and the end of a line
    vocab = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_target(folder: Path, template: str | None) -> Path:
    """`write_tokenizer`, and a target that reads it."""
    write_tokenizer(folder, template)
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    config = toy.target_config(vocab_size=size)
    convert.save_target(folder, config, toy.make_target(config))
    return folder
