"""The pocket model's tokenizer and chat template: GLM's special tokens and format, few words.

    python scripts/pocket/markup.py FOLDER      writes both

Words hold no space, so that a word is the same token wherever it stands; a digit is a token;
punctuation takes its spaces along.
"""

import json
import random
import sys
from functools import cache
from pathlib import Path

import words
from tasks import TASKS, Task
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from detour.text.chat_template import ChatTemplate

END, PREFIX = "<|endoftext|>", ("[gMASK]", "<sop>")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
) + ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tools>", "</tools>")
SPECIAL = (END, *PREFIX, *ROLES)
STOPS = (END, "<|user|>", "<|observation|>")
PIECES = r" ?[^\s\p{L}\p{N}]+ ?|\p{L}+|\p{N}|\s"
VOCABULARY = 1280

TEMPLATE = """[gMASK]<sop>
{%- if tools %}<|system|># Tools
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{%- if thought and loop.index0 > last.user %}<think>{{ thought }}{% endif %}</think>
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{%- set call = call.function or call %}<tool_call>{{ call.name }}
{%- for key, value in call.arguments.items() %}<arg_key>{{ key }}</arg_key><arg_value>
{{- value if value is string else value | tojson(ensure_ascii=False) }}</arg_value>
{%- endfor %}</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif -%}
<tool_response>{{ m.content }}</tool_response>
{%- else %}<|{{ 'user' if m.role == 'user' else 'system' }}|>{{ m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif %}"""


def corpus(count: int = 3000) -> list[str]:
    """Tasks as texts, and every word, for merges to be learnt from."""
    source = random.Random(0)
    makers = list(TASKS.values())
    texts = [render(source.choice(makers)(source, 250)) for _ in range(count)]
    known = [*words.WORDS, *words.VERBS, *words.OBJECTS, *words.FIELDS]
    return texts + [" ".join(known)] * count


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spelt])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = [AddedToken(mark, special=False, normalized=False) for mark in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIAL, *MARKS], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens(marks)
    return tokenizer


@cache
def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE)


def render(task: Task, thinks: bool = True) -> str:
    """The whole conversation as text, ended by the mark that the model is to end with."""
    messages = task.messages
    if not thinks:
        messages = [{**message, "reasoning_content": ""} for message in messages]
    text = template().render(messages, task.tools, add_generation_prompt=False)
    return text + ("<|observation|>" if messages[-1].get("tool_calls") else "<|user|>")


def write(folder: Path) -> Tokenizer:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    saved = json.loads(tokenizer.to_str())
    for token in saved["added_tokens"]:  # the trainer calls all of them special
        token["special"] = token["content"] in SPECIAL
    text = json.dumps(saved, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    made = write(Path(sys.argv[1]))
    known = [*words.WORDS, *words.VERBS, *words.OBJECTS, *words.FIELDS]
    split = [word for word in known if len(made.encode(word).ids) > 1]
    print(f"{made.get_vocab_size()} tokens; words of several: {' '.join(split) or 'none'}")
