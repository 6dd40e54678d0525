"""Folders that transformers saves: small models with random weights, each with a tokenizer."""

import json

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from howdah.text import tokenizer as tokenizers

TEXT = [f"the {n} cats sat on mat {n}, said file {n % 7}; and a dog ran home." for n in range(400)]
BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = BLOCKS | {
    "intermediate_size": 40,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.3}


def byte_tokenizer(*special):
    """A byte-level BPE of 300 entries, and further special tokens from 300 on."""
    made = tokenizers.train(iter(TEXT), 300)
    made.encode_special_tokens = False
    made.add_special_tokens(list(special))
    return made


def word_pieces():
    """A tokenizer like BERT's: words, pieces of words, and [CLS] and [SEP] around a text."""
    words = sorted({w for line in TEXT for w in line.replace(",", " ,").replace(";", " ;").split()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *words, "##s", "##n", ".", "home"]
    vocab = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(special)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    return made


def save(folder, transformers, kind, sizes, *, tokenizer, special, head="CausalLM"):
    """Saves a model of theirs with random weights, and its tokenizer."""
    torch.manual_seed(0)
    entries = tokenizer.get_vocab_size()
    config = transformers.AutoConfig.for_model(kind, **sizes, vocab_size=entries)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(told | special))
    return model


def gpt2(folder, transformers):
    """A GPT-2 whose texts end with <|end|>."""
    end = {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    sizes = GPT2 | {"bos_token_id": 0, "eos_token_id": 0}
    return save(folder, transformers, "gpt2", sizes, tokenizer=byte_tokenizer(), special=end)


def bert(folder, transformers):
    """A BERT with its own template."""
    names = ("pad", "unk", "cls", "sep", "mask")
    special = {f"{name}_token": f"[{name.upper()}]" for name in names}
    sizes = ENCODER | {"pad_token_id": 0}
    given = {"tokenizer": word_pieces(), "special": special, "head": "MaskedLM"}
    return save(folder, transformers, "bert", sizes, **given)


def roberta(folder, transformers):
    """A RoBERTa with a byte-level tokenizer, whose token 1 is padding."""
    made = tokenizers.train(iter(TEXT), 300, "<mask>", extra=[tokenizers.PAD])
    made.encode_special_tokens = False
    special = {"pad_token": tokenizers.PAD, "mask_token": "<mask>", "eos_token": "<|end|>"}
    sizes = ENCODER | {"type_vocab_size": 1, "pad_token_id": 1}
    given = {"tokenizer": made, "special": special, "head": "MaskedLM"}
    return save(folder, transformers, "roberta", sizes, **given)


def t5(folder, transformers):
    """A T5 whose sources end with <|end|>, and which was trained to read prefixes."""
    made = tokenizers.train(iter(TEXT), 300, extra=[tokenizers.PAD])
    made.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", 0)]
    )
    prefixes = {"summarization": "sum: ", "translation_en_to_de": "said the "}
    sizes = {
        "d_model": 32,
        "num_layers": 2,
        "num_heads": 4,
        "d_kv": 8,
        "d_ff": 40,
        "n_positions": 40,
        "initializer_factor": 3.0,
        "pad_token_id": 1,
        "eos_token_id": 0,
        "decoder_start_token_id": 1,
        "task_specific_params": {task: {"prefix": words} for task, words in prefixes.items()},
    }
    special = {"pad_token": tokenizers.PAD, "eos_token": "<|end|>"}
    given = {"tokenizer": made, "special": special, "head": "Seq2SeqLM"}
    return save(folder, transformers, "t5", sizes, **given)
