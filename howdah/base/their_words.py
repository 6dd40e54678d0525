"""The words of other trainers, with howdah's for the same things.

An unknown key of a recipe, word of a layout or option of a command is answered from these tables.
docs/their-words.md shows them; a test holds the page against them. N is a number of the user's
choice, G the size of a group of replicas.
"""

import re
from collections.abc import Mapping

IN_A_LAYOUT = {  # words of FSDP, DeepSpeed, Megatron-LM, torchtitan, Accelerate, without numbers
    "dpN": "ddp distributeddataparallel data_parallel data_parallel_replicate dp_replicate dp "
    "no_shard multi_gpu num_gpus num_processes nproc_per_node world",
    "dpN zero1": "distributed_optimizer use_distributed_optimizer zeroredundancyoptimizer",
    "dpN zero2": "shard_grad_op",
    "dpN zero3": "fsdp fsdp2 full_shard fully_shard use_torch_fsdp2 use_megatron_fsdp dp_shard "
    "data_parallel_shard",
    "dpN zeroN": "deepspeed zero zero_optimization zero_stage stage",
    "dpN zero3 shardG": "hsdp hybrid_shard mics mics_shard",
    "dpN zero3 hpzN": "hpz_partition zero_hpz_partition zeropp",
    "release=step": "reshard_after_forward fsdp_reshard_after_forward",
    "accumulate=whole": "no_sync",
    "tpN": "tensor_parallel tensor_model_parallel model_parallel tp",
    "tpN sp": "sequence_parallel sequence_parallelism",
    "ppN": "pipeline_parallel pipeline_model_parallel pp",
    "interleaved vN": "virtual_pipeline virtual_pipeline_stages virtual_pipeline_model_parallel "
    "interleaved1f1b num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank",
    "zb-v": "zbvzerobubble zbv",
    "cpN": "context_parallel ring_attention cp",
    "cpN context=all-to-all": "ulysses deepspeed_ulysses ulysses_sequence_parallel",
    "epN": "expert_parallel expert_model_parallel moe ep",
    "ppN dpN tpN": "megatron megatron_lm",
    "xN": "gradient_accumulation gradient_accumulation_steps accumulate_grad_batches accumulation "
    "grad_accum num_microbatches",
    "recompute=full": "gradient_checkpointing activation_checkpointing activation_checkpoint "
    "checkpoint_activations recompute_granularity remat",
    "recompute=selective": "recompute_activations selective_recompute selective_checkpointing",
    "optimizer=host": "cpu_offload offload offload_optimizer optimizer_cpu_offload",
    "weights=host optimizer=host": "offload_param offload_params enable_cpu_offload",
    "weights=disk optimizer=disk": "nvme_offload zero_infinity",
    "activations=host": "cpu_checkpointing offload_activations activation_offloading",
}

AS_A_KEY = {  # of TrainingArguments and config.json, DeepSpeed, Megatron-LM, nanoGPT, torchtitan
    "method.lr.peak": "lr learning_rate max_lr base_lr warmup_max_lr",
    "method.lr.warmup_steps": "warmup warmup_steps warmup_iters lr_warmup_iters warmup_num_steps "
    "num_warmup_steps",
    "method.lr.schedule": "lr_scheduler_type lr_scheduler scheduler lr_decay_style decay_type",
    "method.lr.decay_steps": "lr_wsd_decay_iters cooldown_steps",
    "method.lr.min_ratio": "min_lr_ratio min_lr_factor",
    "method.optimizer.name": "optim optimizer optimizer_type",
    "method.optimizer.weight_decay": "weight_decay wd",
    "method.optimizer.betas": "betas adam_betas",
    "method.optimizer.momentum": "sgd_momentum",
    "method.optimizer.epsilon": "adam_epsilon adam_eps eps",
    "method.grad_clip": "max_grad_norm gradient_clipping gradient_clip_val clip_grad grad_clip "
    "clip_grad_norm max_norm",
    "method.dropout": "dropout hidden_dropout resid_pdrop embd_pdrop",
    "method.attention_dropout": "attn_dropout attn_pdrop",
    "method.label_smoothing": "label_smoothing_factor",
    "method.precision": "bf16 fp16 fp8 dtype torch_dtype precision mixed_precision "
    "mixed_precision_param amp",
    "method.gradient_dtype": "communication_data_type mixed_precision_reduce "
    "zero_quantized_gradients qgz",
    "method.gather_dtype": "zero_quantized_weights qwz",
    "method.routing.balance_loss": "moe_aux_loss_coeff router_aux_loss_coef aux_loss_coef",
    "method.routing.z_loss": "moe_z_loss_coeff router_z_loss_coef",
    "method.routing.capacity": "moe_expert_capacity_factor capacity_factor",
    "method.masking.share": "mlm_probability",
    "train.steps": "steps max_steps max_iters train_iters training_steps total_num_steps "
    "num_train_steps",
    "train.epochs": "epochs num_train_epochs num_epochs max_epochs",
    "train.tokens": "train_tokens total_tokens",
    "train.save_every": "save_steps save_interval checkpoint_interval",
    "train.keep_last": "save_total_limit keep_latest_k",
    "train.evaluate_every": "eval_steps eval_interval val_check_interval",
    "train.evaluate_samples": "eval_iters max_eval_samples limit_val_batches",
    "train.log_every": "logging_steps log_interval log_every_n_steps log_freq steps_per_print",
    "train.profile": "profiling enable_profiling profile_step_start",
    "batch.global_batch": "batch_size global_batch_size train_batch_size total_batch_size",
    "batch.micro_batch": "micro_batch_size per_device_train_batch_size per_device_batch_size "
    "train_micro_batch_size_per_gpu local_batch_size pipeline_parallel_microbatch_size",
    "batch.ramp_from": "rampup_batch_size",
    "data.sequence_length": "seq_len seq_length block_size max_seq_length max_seq_len max_length "
    "context_length cutoff_len",
    "data.sources": "dataset dataset_name dataset_path data_path train_file train_data_path",
    "data.sources.field": "text_column dataset_text_field",
    "data.validation": "validation_file valid_data_path eval_dataset val_data_path",
    "data.validation_share": "validation_split_percentage validation_split val_split",
    "data.tokenizer": "tokenizer tokenizer_name tokenizer_name_or_path tokenizer_model "
    "tokenizer_path hf_assets_path",
    "data.end_token": "eos_token",
    "data.chat": "chat assistant_only_loss completion_only_loss train_on_responses_only",
    "data.rows": "packing",
    "init_from": "model_name_or_path pretrained_model_name_or_path pretrained initial_load_path "
    "base_model",
    "init_adapter": "adapter_name_or_path adapter_path peft_path",
    "method.adapter.rank": "lora peft peft_config lora_rank lora_r",
    "method.adapter.kind": "dora use_dora",
    "method.adapter.alpha": "lora_alpha",
    "method.adapter.targets": "target_modules lora_target lora_target_modules",
    "method.train": "freeze frozen requires_grad trainable freeze_layers unfrozen_parameters",
    "model.vocab": "vocab_size padded_vocab_size",
    "model.width": "hidden_size n_embd d_model dim",
    "model.layers": "num_layers n_layer n_layers num_hidden_layers",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.kv_heads": "num_key_value_heads num_query_groups n_kv_heads",
    "model.head_size": "head_dim kv_channels",
    "model.ffn_size": "intermediate_size ffn_hidden_size d_ff n_inner",
    "model.feedforward": "hidden_act activation_function swiglu",
    "model.context": "max_position_embeddings n_positions n_ctx",
    "model.positions": "position_embedding_type",
    "model.rope_theta": "rotary_base",
    "model.rope_scaling.factor": "rotary_scaling_factor",
    "model.norm": "normalization",
    "model.norm_eps": "norm_epsilon rms_norm_eps layer_norm_eps layer_norm_epsilon",
    "model.bias": "add_bias_linear disable_bias_linear",
    "model.qkv_bias": "add_qkv_bias attention_bias",
    "model.qk_norm": "qk_layernorm",
    "model.tie_embeddings": "tie_word_embeddings tie_weights untie_embeddings_and_output_weights",
    "model.experts.count": "num_experts num_local_experts n_routed_experts",
    "model.experts.top_k": "num_experts_per_tok moe_router_topk",
    "model.experts.ffn_size": "moe_intermediate_size moe_ffn_hidden_size",
    "model.experts.shared": "shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    "model.experts.first_dense": "first_k_dense_replace",
    "model.experts.every": "decoder_sparse_step moe_layer_freq",
    "seed": "data_seed random_seed",
    "device": "use_cpu no_cuda accelerator",
    "compile": "torch_compile",
    "folder": "output_dir out_dir save_dir dump_folder",
    "name": "run_name experiment_name",
    "train.callbacks": "callbacks callback add_callback",
    "train.tracker": "report_to log_with tensorboard enable_tensorboard wandb enable_wandb",
    "method.optimizer.average": "ema ema_decay use_ema ema_power",
}

OTHERWISE = {  # what no single key is called; what is done here ends a sentence
    "a warm-up is counted in steps: method.lr.warmup_steps": "warmup_ratio lr_warmup_fraction "
    "warmup_proportion lr_warmup_samples",
    "the lowest rate is a share of the peak: method.lr.min_ratio": "min_lr lr_min warmup_min_lr",
    "the decay of method.lr.schedule=wsd is counted in steps: method.lr.decay_steps": "decay_ratio",
    "a schedule ends with the last step of the run: train.steps": "lr_decay_iters lr_decay_samples",
    "both are one list: method.optimizer.betas=[0.9, 0.95]": "beta1 beta2 adam_beta1 adam_beta2",
    "a length is given in train.steps, train.epochs or train.tokens": "train_samples",
    "checkpoints are written every train.save_every steps, and at the end": "save_strategy",
    "evaluations are every train.evaluate_every steps, and at the end": "eval_strategy "
    "evaluation_strategy do_eval",
    "an evaluation computes batch.micro_batch samples at once": "per_device_eval_batch_size "
    "eval_batch_size",
    "a share of the documents is kept for it: data.validation_share": "split",
    "the run folder gets metrics.jsonl, and files of trackers": "tensorboard_dir logging_dir "
    "wandb_project",
    "the same command goes on from the newest checkpoint of its run folder": "load "
    "resume_from_checkpoint load_checkpoint",
    "the best checkpoint is kept, for howdah export RUN --best": "load_best_model_at_end "
    "metric_for_best_model",
    "batches are read ahead by a thread; there is nothing to set": "num_workers "
    "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor",
    "gradients are sent in buckets by a fixed rule; there is nothing to set": "ddp_bucket_cap_mb "
    "reduce_bucket_size allgather_bucket_size",
    "messages are always sent beside the computation; there is nothing to set": "overlap_comm "
    "overlap_grad_reduce overlap_param_gather",
    "torch's scaled_dot_product_attention is used; there is nothing to set": "attn_implementation "
    "attention_backend use_flash_attn",
    "howdah export RUN writes a folder, which hf upload takes": "push_to_hub hub_model_id",
    "several machines are started by torchrun (docs/how-to/two-machines.md)": "nnodes num_nodes "
    "num_machines",
    "a schedule is a word of the layout, such as 1f1b or zb-v": "pipeline_parallel_schedule "
    "pipeline_schedule",
    "a named model is model.preset=NAME, of those that howdah presets lists": "flavor model_name",
    "weights start with a standard deviation of 0.02": "initializer_range init_method_std",
    "a template is a file of the tokenizer's folder, and data.chat uses it": "chat_template "
    "chat_template_path",
    "GGUF is not written; howdah export RUN --to DIR writes a Hugging Face folder, which "
    "llama.cpp's convert_hf_to_gguf.py reads": "gguf llama_cpp ollama save_pretrained_gguf",
    "the newest checkpoint of a run is taken, and by howdah export RUN --best the best; for an "
    "older one, move the newer folders out of RUN/checkpoints": "step_to_load load_step ckpt_step "
    "checkpoint_step initial_load_step resume_step",
    "howdah export RUN --to DIR writes the weights with the adapter's in them": "merge_and_unload "
    "merge_adapter merge_lora",
    "here this is method.optimizer.name=adamw": "adamw_torch adamw_torch_fused adamw_hf "
    "adamw_apex_fused fused_adam fusedadam",
    "howdah train RECIPE --restarts N starts again after a failure; under torchrun its own option "
    "does": "max_restarts",
    "rows with a prompt and its completion, or with messages, are read by data.chat, and one field "
    "of a row by data.sources.field; no template joins other fields, so write them to one before": (
        "formatting_func prompt_template text_template instruction_template column_map"
    ),
    "files of other machines are not read: download them, and name them in data.sources; hf:NAME "
    "there is a dataset of the hub": "s3 gs gcs fsspec storage_options",
}

ABSENT_WORDS = {
    "not there yet: no product reads weights of 4 or 8 bits that training keeps so; method.adapter "
    "with method.precision=bf16 and zero3 shares the base out instead": "qlora load_in_4bit "
    "load_in_8bit bnb_4bit quantization_config",
    "not there yet: it needs pairs of answers and a second model beside the one that is trained; "
    "data.chat trains on the better answer alone": "dpo ppo grpo orpo kto rlhf reward_model",
    "not there yet; method.adapter trains without it": "lora_dropout use_rslora",
    "not there yet: method.optimizer.name is adamw, adam, sgd or rmsprop; zero1 shares their "
    "states out, and optimizer=host keeps them in the host's memory": "muon adafactor lion sophia "
    "lamb lars galore galore_adamw apollo apollo_adamw prodigy schedule_free shampoo soap adagrad "
    "adadelta adamax nadam",
    "not there yet: an optimizer's states are float32; zero1 shares them out, and optimizer=host "
    "keeps them in the host's memory": "adam8bit adam_8bit adamw8bit adamw_8bit adamw_bnb_8bit "
    "adamw_torch_8bit adamw_torch_4bit paged_adamw paged_adamw_8bit paged_adamw_32bit lion_8bit "
    "bnb bitsandbytes",
    "not there yet: text is tokenised once, into files of the cache, before the first step": (
        "streaming streaming_dataset iterable_dataset is_streaming use_streaming"
    ),
}


def _by_word(table: Mapping[str, str]) -> dict[str, str]:
    return {word: ours for ours, words in table.items() for word in words.split()}


LAYOUT, KEYS = _by_word(IN_A_LAYOUT), _by_word(AS_A_KEY)
SAID, ABSENT = _by_word(OTHERWISE), _by_word(ABSENT_WORDS)


def ours(word: str, table: Mapping[str, str]) -> str:
    """howdah's word for a word of another trainer, spelled in any way; empty if it is none."""
    plain = re.sub(r"[-\s]+", "_", word.strip().lower().removesuffix("()"))
    bare = re.sub(r"_?[=:]?_?(\d+|true|false)$", "", plain)
    tries = (plain, bare, re.sub(r"_(size|degree)$", "", bare))
    return next((table[one] for one in tries if one in table), "")


def our_key(word: str) -> str:
    """howdah's key for a word of another trainer, or "layout=" and words of a layout; empty if it
    is none.
    """
    found = ours(word, LAYOUT)
    return ours(word, KEYS) or (f"layout={found}" if found else "")


def otherwise(word: str) -> str:
    """What is done here in place of a word of another trainer that no key stands for, or that it is
    not there yet; empty if the word is unknown.
    """
    absent = ours(word, ABSENT)
    return f"it is {absent}" if absent else ours(word, SAID)


def answer_layout(word: str, known: Mapping[str, object]) -> str:
    """What to do about an unknown word of a layout: how it is spelled here; empty if unclear."""
    if "," in word:
        return "; words are separated by spaces"
    if word == "auto":
        return "; auto stands alone, and only train, check and plan find a layout for it"
    apart = re.fullmatch(r"([a-z]+)[-_=:]+(\d+|\*)", word.lower())
    if apart and apart[1] in known:
        return f"; write {apart[1] + apart[2]!r}"
    start = re.match(r"[a-z]+", word.lower())
    if word != word.lower() and start and start[0] in known:
        return f"; write {word.lower()!r}"
    found, number = ours(word, LAYOUT), re.search(r"\d+$", word)
    if number and word.lower() not in LAYOUT:
        found = number[0].join(found.rsplit("N", 1))
    return f"; here it is written {found!r}" if found else ""
