"""The words of other trainers, with howdah's for the same things.

An unknown key of a recipe, or word of a layout, is answered from these tables. docs/their-words.md
shows them; a test holds the page against them. N is a number of the user's choice.
"""

import re
from collections.abc import Mapping

LAYOUT = {  # words of FSDP, DeepSpeed, Megatron-LM, torchtitan, Accelerate; without their numbers
    "ddp": "dpN",
    "distributeddataparallel": "dpN",
    "data_parallel": "dpN",
    "no_shard": "dpN",
    "distributed_optimizer": "dpN zero1",
    "fsdp": "dpN zero3",
    "full_shard": "dpN zero3",
    "shard_grad_op": "dpN zero2",
    "hsdp": "dpN zero3 shardG",
    "hybrid_shard": "dpN zero3 shardG",
    "mics": "dpN zero3 shardG",
    "hpz": "dpN zero3 shardG",
    "reshard_after_forward": "release=step",
    "no_sync": "accumulate=whole",
    "stage": "zeroN",
    "zero_stage": "zeroN",
    "tensor_parallel": "tpN",
    "sequence_parallel": "tpN sp",
    "pipeline_parallel": "ppN",
    "virtual_pipeline": "interleaved vN",
    "virtual_pipeline_stages": "interleaved vN",
    "context_parallel": "cpN",
    "ulysses": "cpN context=all-to-all",
    "expert_parallel": "epN",
    "gradient_accumulation": "xN",
    "accumulation": "xN",
    "gradient_checkpointing": "recompute=full",
    "activation_checkpointing": "recompute=full",
    "cpu_offload": "optimizer=host",
    "offload": "optimizer=host",
}

KEYS = {  # keys of Hugging Face's TrainingArguments, DeepSpeed, Megatron-LM, nanoGPT, torchtitan
    "lr": "method.lr.peak",
    "learning_rate": "method.lr.peak",
    "min_lr": "method.lr.min_ratio",
    "warmup": "method.lr.warmup_steps",
    "warmup_steps": "method.lr.warmup_steps",
    "warmup_iters": "method.lr.warmup_steps",
    "lr_scheduler_type": "method.lr.schedule",
    "lr_decay_style": "method.lr.schedule",
    "optim": "method.optimizer.name",
    "optimizer": "method.optimizer.name",
    "weight_decay": "method.optimizer.weight_decay",
    "betas": "method.optimizer.betas",
    "adam_beta1": "method.optimizer.betas",
    "adam_beta2": "method.optimizer.betas",
    "adam_epsilon": "method.optimizer.epsilon",
    "max_grad_norm": "method.grad_clip",
    "gradient_clipping": "method.grad_clip",
    "clip_grad": "method.grad_clip",
    "grad_clip": "method.grad_clip",
    "dropout": "method.dropout",
    "label_smoothing_factor": "method.label_smoothing",
    "bf16": "method.precision",
    "fp16": "method.precision",
    "dtype": "method.precision",
    "precision": "method.precision",
    "epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "steps": "train.steps",
    "max_steps": "train.steps",
    "max_iters": "train.steps",
    "train_iters": "train.steps",
    "batch_size": "batch.global_batch",
    "global_batch_size": "batch.global_batch",
    "train_batch_size": "batch.global_batch",
    "micro_batch_size": "batch.micro_batch",
    "per_device_train_batch_size": "batch.micro_batch",
    "per_device_batch_size": "batch.micro_batch",
    "train_micro_batch_size_per_gpu": "batch.micro_batch",
    "seq_len": "data.sequence_length",
    "seq_length": "data.sequence_length",
    "block_size": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "dataset": "data.sources",
    "data_path": "data.sources",
    "train_file": "data.sources",
    "text_column": "data.sources.field",
    "dataset_text_field": "data.sources.field",
    "validation_file": "data.validation",
    "valid_data_path": "data.validation",
    "eval_dataset": "data.validation",
    "validation_split_percentage": "data.validation_share",
    "tokenizer_name": "data.tokenizer",
    "eos_token": "data.end_token",
    "model_name_or_path": "init_from",
    "pretrained": "init_from",
    "vocab_size": "model.vocab",
    "hidden_size": "model.width",
    "n_embd": "model.width",
    "num_layers": "model.layers",
    "n_layer": "model.layers",
    "num_hidden_layers": "model.layers",
    "n_head": "model.heads",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "intermediate_size": "model.ffn_size",
    "max_position_embeddings": "model.context",
    "tie_word_embeddings": "model.tie_embeddings",
    "output_dir": "folder",
    "out_dir": "folder",
    "save_dir": "folder",
    "run_name": "name",
    "save_steps": "train.save_every",
    "save_interval": "train.save_every",
    "save_total_limit": "train.keep_last",
    "eval_steps": "train.evaluate_every",
    "eval_interval": "train.evaluate_every",
    "logging_steps": "train.log_every",
    "log_interval": "train.log_every",
    "torch_compile": "compile",
    "num_gpus": "layout=dpN",
    "world_size": "layout=dpN",
    "gradient_accumulation_steps": "layout=xN",
    "gradient_checkpointing": "layout=recompute=full",
    "fsdp": "layout=dpN zero3",
    "ddp": "layout=dpN",
    "deepspeed": "layout=dpN zeroN",
    "zero": "layout=dpN zeroN",
    "zero_stage": "layout=dpN zeroN",
    "tp": "layout=tpN",
    "tensor_model_parallel_size": "layout=tpN",
    "pp": "layout=ppN",
    "pipeline_model_parallel_size": "layout=ppN",
    "dp": "layout=dpN",
    "sequence_parallel": "layout=tpN sp",
}

ABSENT = {"lora": "not there yet; init_from=FOLDER trains all weights of a model"}


def ours(word: str, table: Mapping[str, str]) -> str:
    """howdah's word for a word of another trainer, spelled in any way; empty if it is none."""
    plain = re.sub(r"[-\s]+", "_", word.strip().lower().removesuffix("()"))
    return table.get(plain) or table.get(re.sub(r"_?[=:]?_?(\d+|true|false)$", "", plain), "")


def answer_layout(word: str, known: Mapping[str, object]) -> str:
    """What to do about an unknown word of a layout: how it is spelled here; empty if unclear."""
    if "," in word:
        return "; words are separated by spaces"
    if word == "auto":
        return "; auto stands alone, and only train, check and plan find a layout for it"
    start = re.match(r"[a-z]+", word.lower())
    if word != word.lower() and start and start[0] in known:
        return f"; write {word.lower()!r}"
    apart = re.fullmatch(r"([a-z]+)[-_=:]+(\d+|\*)", word.lower())
    if apart and apart[1] in known:
        return f"; write {apart[1] + apart[2]!r}"
    found, number = ours(word, LAYOUT), re.search(r"\d+$", word)
    if number:
        found = found.replace("N", number[0], 1)
    return f"; here it is written {found!r}" if found else ""
