"""Other trainers' words are answered with howdah's, and every answer can be used."""

import re
from pathlib import Path

import pytest

from howdah.base.tables import _paths
from howdah.base.their_words import (
    ABSENT,
    ABSENT_WORDS,
    AS_A_KEY,
    IN_A_LAYOUT,
    KEYS,
    LAYOUT,
    OTHERWISE,
    SAID,
    otherwise,
    our_key,
    ours,
)
from howdah.config.recipe import Run
from howdah.plan.layout import parse_layout

PAGE = (Path(__file__).parents[2] / "docs" / "their-words.md").read_text(encoding="utf-8")


def with_numbers(words):
    """A layout's words with N and G filled in, and with what they cannot be without."""
    filled = re.sub(r"zeroN", "zero2", words)
    filled = re.sub(r"(?<=[a-z])N", "4", filled).replace("shardG", "shard2")
    more = {
        "release": " dp4 zero3",
        "accumulate": " dp4 zero2",
        "interleaved": " pp2",
        "zb-v": " pp2",
        "ep4": " dp4",
    }
    return filled + more.get(filled.split("=")[0].split()[0], "")


@pytest.mark.parametrize("words", IN_A_LAYOUT)
def test_every_answer_about_a_layout_is_one(words):
    assert parse_layout(with_numbers(words))


def test_every_answer_about_a_key_is_one():
    assert set(AS_A_KEY) <= set(_paths(Run, ""))


def test_keys_in_other_answers_are_there():
    named = {key for said in OTHERWISE for key in re.findall(r"[a-z]+(?:\.[a-z_]+)+", said)}
    files = {key for key in named if key.endswith((".md", ".jsonl", ".py", ".cpp"))}
    assert len(named) > 10 and named - files <= {*_paths(Run, ""), "model.preset"}


def test_a_word_has_one_answer():
    tables = IN_A_LAYOUT, AS_A_KEY, OTHERWISE, ABSENT_WORDS
    words = [word for table in tables for some in table.values() for word in some.split()]
    assert len(words) == len(set(words)) == sum(map(len, (LAYOUT, KEYS, SAID, ABSENT)))
    assert not {key.rpartition(".")[2] for key in AS_A_KEY} & {*LAYOUT, *SAID, *ABSENT}


def test_words_are_known_however_they_are_spelled():
    assert ours("FULL_SHARD", LAYOUT) == ours("full-shard", LAYOUT) == "dpN zero3"
    assert ours("ddp2", LAYOUT) == ours("DDP=2", LAYOUT) == "dpN"
    assert ours("reshard_after_forward=False", LAYOUT) == "release=step"
    assert ours("tensor_model_parallel_size", LAYOUT) == ours("tensor_parallel_degree", LAYOUT)
    assert ours("walrus", LAYOUT) == ours("", KEYS) == our_key("walrus") == otherwise("") == ""
    assert our_key("--warmup-steps".lstrip("-")) == "method.lr.warmup_steps"
    assert our_key("pipeline_parallel_degree") == "layout=ppN"
    assert otherwise("QLoRA").startswith("it is not there yet: ")


THEIRS = {  # arguments of each, as its own source or documentation names them
    "TrainingArguments": (
        "learning_rate num_train_epochs max_steps warmup_ratio warmup_steps lr_scheduler_type "
        "weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm optim bf16 fp16 seed "
        "data_seed per_device_train_batch_size per_device_eval_batch_size "
        "gradient_accumulation_steps gradient_checkpointing logging_steps save_steps "
        "save_strategy save_total_limit eval_steps eval_strategy output_dir run_name report_to "
        "resume_from_checkpoint load_best_model_at_end dataloader_num_workers torch_compile fsdp "
        "deepspeed use_cpu ddp_bucket_cap_mb label_smoothing_factor push_to_hub "
        "adamw_torch_fused adamw_bnb_8bit paged_adamw_8bit adafactor galore_adamw"
    ),
    "DeepSpeed's JSON": (
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer "
        "scheduler lr betas eps weight_decay warmup_min_lr warmup_max_lr warmup_num_steps "
        "total_num_steps gradient_clipping fp16 bf16 zero_optimization stage offload_optimizer "
        "offload_param overlap_comm reduce_bucket_size allgather_bucket_size "
        "zero_hpz_partition_size mics_shard_size steps_per_print communication_data_type "
        "activation_checkpointing cpu_checkpointing"
    ),
    "Megatron-LM": (
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "expert_model_parallel_size sequence_parallel num_layers_per_virtual_pipeline_stage "
        "use_distributed_optimizer recompute_granularity recompute_activations micro_batch_size "
        "global_batch_size rampup_batch_size train_iters train_samples lr min_lr lr_decay_style "
        "lr_decay_iters lr_warmup_iters lr_warmup_fraction clip_grad adam_beta1 adam_beta2 "
        "adam_eps sgd_momentum seq_length max_position_embeddings num_layers hidden_size "
        "ffn_hidden_size num_attention_heads num_query_groups kv_channels swiglu normalization "
        "norm_epsilon position_embedding_type rotary_base disable_bias_linear add_qkv_bias "
        "untie_embeddings_and_output_weights qk_layernorm hidden_dropout num_experts "
        "moe_router_topk moe_ffn_hidden_size moe_aux_loss_coeff moe_z_loss_coeff "
        "moe_expert_capacity_factor save_interval eval_interval eval_iters log_interval data_path "
        "split tokenizer_model vocab_size overlap_grad_reduce overlap_param_gather "
        "init_method_std"
    ),
    "torchtitan": (
        "dump_folder log_freq enable_tensorboard enable_wandb flavor tokenizer_path lr beta1 "
        "beta2 eps warmup_steps decay_ratio decay_type lr_min dataset_path local_batch_size "
        "global_batch_size seq_len max_norm enable_cpu_offload mixed_precision_param "
        "mixed_precision_reduce data_parallel_replicate_degree data_parallel_shard_degree "
        "fsdp_reshard_after_forward tensor_parallel_degree pipeline_parallel_degree "
        "pipeline_parallel_schedule pipeline_parallel_microbatch_size context_parallel_degree "
        "expert_parallel_degree initial_load_path keep_latest_k enable_profiling "
        "activation_checkpoint"
    ),
}


@pytest.mark.parametrize("trainer", THEIRS)
def test_what_users_of_a_trainer_write_is_answered(trainer):
    """A recipe with warmup_ratio or beta1 was only told that the key is unknown."""
    ours_too = {path.rpartition(".")[2] for path in _paths(Run, "")}
    words = THEIRS[trainer].split()
    known = [word for word in words if our_key(word) or otherwise(word) or word in ours_too]
    assert known == words


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("Words in a layout", IN_A_LAYOUT),
        ("Keys in a recipe", AS_A_KEY),
        ("What is done here instead", {**OTHERWISE, **ABSENT_WORDS}),
    ],
)
def test_the_page_shows_every_word(heading, table):
    section = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| (`.+`) \|$", section, re.M)
    shown = {ours.strip("`"): " ".join(re.findall(r"`([^`]+)`", theirs)) for ours, theirs in rows}
    assert shown == table
