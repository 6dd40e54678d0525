"""Conversations for tests, a tokenizer with special tokens, and three chat templates.

.venv/bin/python tests/made_chats.py     with trl 1.16.0 installed, prints trl_masks.json
"""

import json
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

MASKS = Path(__file__).with_name("trl_masks.json")
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "</s>", "<s>", "<|user|>", "<|system|>", "<|assistant|>"),
)
CHATML = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant\\n' }}\n"
    "        {%- generation %}\n"
    "        {{- message.content + '<|im_end|>' }}\n"
    "        {%- endgeneration %}\n"
    "        {{- '\\n' }}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
LLAMA = (  # Llama 3's, with marks
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
ZEPHYR = (  # Zephyr's, which has no marks
    "{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n"
    "{{ '<|assistant|>' }}\n"
    "{% endif %}\n"
    "{% endfor %}"
)
FOLDERS = {  # template, eos, bos
    "chatml": (CHATML, "<|im_end|>", None),
    "llama": (LLAMA, "<|eot_id|>", "<|begin_of_text|>"),
    "zephyr": (ZEPHYR, "</s>", "<s>"),
}


def turns(*texts, system=None):
    """Messages of a user and an assistant in turns."""
    roles = ("user", "assistant") * len(texts)
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]


MESSAGES = [
    {"messages": turns("What follows 3?", "4 follows 3.")},
    {"messages": turns("Say it twice: été", "été, été  ", system="You are brief.")},
    {"messages": turns("one", "two", "three", "four\n", "five", "  six \U0001f418\U0001f9ff")},
    {"messages": turns("What?", "A line\nand another\n\n", system=" odd ")},
]
PAIRS = [
    {"prompt": "What follows 3? ", "completion": "4 follows 3."},
    {"prompt": "Q: été\nA:", "completion": " été, été"},
    {"prompt": "12", "completion": "3"},  # whose tokens may join
    {"prompt": "Elephants are", "completion": " large \U0001f418"},
]
CHAT_PAIRS = [
    {"prompt": turns("What follows 3?"), "completion": turns("", "4 follows 3.")[1:]},
    {
        "prompt": turns("one", "two", "three", system="brief"),
        "completion": turns("", "four  ")[1:],
    },
]


def rows_of(kind):
    """The rows for which TRL's masks are kept, by name."""
    found = {"pairs": PAIRS, "chat_pairs": CHAT_PAIRS}
    return found if kind == "zephyr" else {"messages": MESSAGES, **found}


def made_tokenizer():
    """Byte-level BPE with the special tokens of three families, learned from the rows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [json.dumps(row, ensure_ascii=False) for row in (*MESSAGES, *PAIRS, *CHAT_PAIRS)]
    tokenizer.train_from_iterator([*texts, "123 1234 123"] * 3, trainer)
    return tokenizer


def make_folder(folder, kind, *, template=None, in_file=True):
    """A folder with a tokenizer and one of the templates, or another; its path."""
    text, eos, bos = FOLDERS[kind]
    text = text if template is None else template
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = made_tokenizer()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": eos}
    if bos:
        config["bos_token"] = bos
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    if text and in_file:
        (folder / "chat_template.jinja").write_text(text)
    elif text:
        config["chat_template"] = text
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_rows(path, rows):
    """A file of JSON lines; its path."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def trl_masks(folder):
    """By template and rows, the tokens and labels that TRL's SFTTrainer makes of each row."""
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=400, num_attention_heads=1, **sizes))
    found = {}
    for kind in FOLDERS:
        tokenizer = AutoTokenizer.from_pretrained(make_folder(folder / kind, kind))
        for name, rows in rows_of(kind).items():
            settings = SFTConfig(
                output_dir=str(folder / "out"),
                report_to=[],
                use_cpu=True,
                bf16=False,
                max_length=None,
                assistant_only_loss=name == "messages",
            )
            trainer = SFTTrainer(
                model=model,
                args=settings,
                train_dataset=Dataset.from_list(rows),
                processing_class=tokenizer,
            )
            found[f"{kind} {name}"] = [
                {"ids": row["input_ids"], "labels": row["labels"]} for row in trainer.train_dataset
            ]
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        json.dump(trl_masks(Path(made)), sys.stdout)
