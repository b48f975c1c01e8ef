"""Table of GPT-NeoX's keys."""

from megacore.adopt.rules import (
    DECIDES_DATA,
    DECIDES_START,
    ONLY_LOADING,
    ONLY_LOGGING,
    ONLY_PROCESSES,
    ONLY_SPEED,
    Absent,
    Choice,
    Joint,
    NoEffect,
    Rule,
    Rules,
    To,
    integer,
    number,
    positive,
    switch,
)

_TE = Absent("TransformerEngine's layers and fp8", "train.precision bf16")
_BATCH = Joint("it decides batch sizes")
_MLP = Joint("it decides the MLP")
_BIAS = Joint("it decides the biases")
_INIT = Joint("it decides the first weights")
_ZERO = Joint("it is a part of DeepSpeed's JSON")
_TUNING = Absent("preference data and labels", "the flow finetune")
_MUP = Absent("µP", "model.init_method_std")

TABLE: dict[str, Rule] = {
    "num_layers": To("model.num_layers", positive),
    "hidden_size": To("model.hidden_size", positive),
    "num_attention_heads": To("model.num_attention_heads", positive),
    "num_kv_heads": To("model.num_query_groups", positive),
    "attention_type": NoEffect("num_kv_heads decides it"),
    "seq_length": To("data.seq_length", positive),
    "max_position_embeddings": To("model.max_position_embeddings", positive),
    "intermediate_size": _MLP,
    "expansion_factor": _MLP,
    "mlp_multiple_of": _MLP,
    "activation": _MLP,
    "bias_gelu_fusion": _MLP,
    "onnx_safe": _MLP,
    "norm": Choice(
        "model.normalization",
        {"layernorm": "layernorm", "rmsnorm": "rmsnorm"},
        "this norm",
        "layernorm or rmsnorm",
    ),
    "layernorm_epsilon": Joint("it decides the norms' epsilon"),
    "rms_norm_epsilon": Joint("it decides the norms' epsilon"),
    "scalenorm_epsilon": NoEffect("it is for scalenorm"),
    "use_qk_layernorm": Absent(
        "one norm that queries and keys share", "model.qk_layernorm, a norm for each"
    ),
    "pos_emb": Choice(
        "model.position_embedding_type",
        {"learned": "learned_absolute", "rotary": "rope", "alibi": "alibi", "none": "none"},
        "these positions",
        "model.position_embedding_type rope",
    ),
    "rotary_pct": Joint("it decides the rotary positions"),
    "rotary_emb_base": Joint("it decides the rotary positions"),
    "rotary_save_freqs_buffer": ONLY_SPEED,
    "opt_pos_emb_offset": Absent("shifted positions", "model.position_embedding_type"),
    "no_weight_tying": To("model.untie_embeddings_and_output_weights", switch),
    "gpt_j_residual": To("model.parallel_residual", switch),
    "gpt_j_tied": Absent("one norm for both branches", "model.parallel_residual"),
    "attention_config": Joint("it decides the attention"),
    "sparsity_config": Absent("sparse attention", "model.sliding_window"),
    "sliding_window_width": Joint("it decides the attention"),
    "use_bias_in_norms": _BIAS,
    "use_bias_in_attn_linear": _BIAS,
    "use_bias_in_mlp": _BIAS,
    "num_unique_layers": Absent("layers with the same weights", "model.num_layers"),
    "param_sharing_style": NoEffect("it is for layers with the same weights"),
    "hidden_dropout": To("model.hidden_dropout", number),
    "attention_dropout": To("model.attention_dropout", number),
    "init_method": _INIT,
    "init_method_std": _INIT,
    "output_layer_init_method": _INIT,
    "make_vocab_size_divisible_by": Joint("it decides the padding of the vocabulary"),
    "apply_query_key_layer_scaling": NoEffect("scores are computed in fp32: nothing overflows"),
    "attention_softmax_in_fp32": NoEffect("attention's softmax is always in fp32"),
    "fp16_lm_cross_entropy": NoEffect("the loss is always computed in fp32"),
    "soft_prompt_tuning": Absent("prompt tuning", "the flow finetune"),
    "moe_num_experts": Absent("mixture of experts", "a dense model", ("1",)),
    "gmlp_attn_dim": NoEffect("it is for gMLP, which attention_config turns on"),
    "precision": Joint("it decides the precision"),
    "pipe_parallel_size": Joint("it decides the pipeline"),
    "model_parallel_size": To("parallel.tensor_model_parallel_size", positive),
    "sequence_parallel": Joint("it decides sequence parallelism"),
    "context_parallel_size": Absent(
        "GPT-NeoX's context parallelism", "parallel.context_parallel_size", ("1",)
    ),
    "pipe_partition_method": NoEffect("layers are divided evenly"),
    "output_layer_parallelism": NoEffect("the head's rows are divided over the vocabulary"),
    "use_bnb_optimizer": Absent("an 8-bit optimizer", "AdamW"),
    "lr": NoEffect("GPT-NeoX takes the learning rate of optimizer.params"),
    "lr_decay_style": Choice(
        "optim.lr_decay_style",
        {"linear": "linear", "cosine": "cosine", "constant": "constant"},
        "this schedule",
        "cosine, linear or constant",
    ),
    "lr_decay_iters": To("optim.lr_decay_iters", integer),
    "lr_decay_fraction": Joint("it decides the learning-rate schedule"),
    "min_lr": To("optim.min_lr", number),
    "warmup": To("optim.lr_warmup_fraction", number),
    "override_lr_scheduler": NoEffect("a run's schedule is that of its configuration"),
    "use_checkpoint_lr_scheduler": NoEffect("a run's schedule is that of its configuration"),
    "weight_decay": To("optim.weight_decay", number),
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "global_num_gpus": _BATCH,
    "num_gpus": _BATCH,
    "num_nodes": _BATCH,
    "train_iters": To("train.train_iters", integer),
    "train_epochs": Absent("a number of epochs", "train.train_iters"),
    "eval_iters": To("train.eval_iters", integer),
    "eval_interval": To("train.eval_interval", integer),
    "log_interval": To("train.log_interval", integer),
    "exit_interval": To("train.exit_interval", integer, ("0",)),
    "checkpoint_factor": Joint("it decides the intervals of checkpoints"),
    "checkpoint_scale": Absent(
        "checkpoints in growing intervals", "checkpoint.save_interval", ("linear",)
    ),
    "extra_save_iters": Absent("checkpoints at listed iterations", "checkpoint.keep_every"),
    "keep_last_n_checkpoints": To("checkpoint.keep_last", integer),
    "checkpoint_activations": Joint("it decides what is recomputed"),
    "checkpoint_num_layers": NoEffect("each layer's input is stored: memory only"),
    "seed": To("seed", integer),
    "z_loss": NoEffect("GPT-NeoX adds it to the loss of reward models only"),
    "data_path": DECIDES_DATA,
    **{
        f"{part}_data_{what}": DECIDES_DATA
        for part in ("train", "valid", "test")
        for what in ("paths", "weights")
    },
    "weight_by_num_documents": Absent("weights by numbers of documents", "data.blend"),
    "weighted_sampler_alpha": NoEffect("it is for weight_by_num_documents"),
    "data_impl": Absent("this form of data", "Megatron's mmap form", ("mmap", "infer")),
    "pack_impl": To("data.packing"),
    "allow_chopped": NoEffect("it is for documents that are not packed"),
    "train_impl": Absent("training with preferences", "the flow finetune", ("normal",)),
    "dataset_impl": Absent("this data set", "gpt2", ("gpt2",)),
    "split": DECIDES_DATA,
    "eod_mask_loss": To("data.eod_mask_loss", switch),
    "tokenizer_type": Joint("it decides the tokenizer"),
    "vocab_file": Joint("it decides the tokenizer"),
    "merge_file": Joint("it decides the tokenizer"),
    "save": DECIDES_START,
    "load": DECIDES_START,
    "finetune": DECIDES_START,
    "no_load_optim": DECIDES_START,
    "no_load_rng": DECIDES_START,
    "no_save_optim": Absent("checkpoints without optimizer state", "checkpoint.keep_last"),
    "no_save_rng": Absent("checkpoints without random state", "complete checkpoints"),
    "checkpoint_validation_with_forward_pass": NoEffect("the gate checks a model"),
    "s3_path": Absent("uploads of checkpoints", "export.push_to_hub"),
    "hostfile": Joint("it decides the hosts"),
    "launcher": Joint("it decides the launcher"),
    "optimizer": _ZERO,
    "curriculum_learning": _ZERO,
    "deepspeed_extra_args": Absent("keys passed on to DeepSpeed", "the same keys at the top"),
    "use_mup": _MUP,
    "autotuning": Absent("DeepSpeed's tuning", "megacore plan --search"),
    "autotuning_config": NoEffect("it is for autotuning"),
    "save_interval": NoEffect("GPT-NeoX reads checkpoint_factor"),
    "serve_model_weights": Absent("a server of weights", "megacore generate"),
    "text_gen_type": NoEffect("it is for generation; here: megacore generate"),
}
FAMILIES: tuple[tuple[str, Rule], ...] = (
    (
        r"mup_.*|coord_check|save_base_shapes|base_shapes_file",
        NoEffect("it is for µP, which use_mup turns on"),
    ),
    (r"te_(columnparallel|rowparallel|layernorm_mlp|mha)", _TE),
    (r"te_fp8_.*", NoEffect("it is for TransformerEngine's layers")),
    (
        r"moe_.*|expert_interval|use_tutel",
        NoEffect("it is for experts, which moe_num_experts turns on"),
    ),
    (
        r"mamba_.*|dim_att|head_size|ffn_dim",
        NoEffect("it is for Mamba and RWKV, which attention_config turns on"),
    ),
    (
        r".*_(label|reward)_data_paths|(pos|neg)_.*|(dpo|kto|kl|reinforce)_.*|fp32_reinforce",
        _TUNING,
    ),
    (
        r"(scaled_|layernorm_|rmsnorm_|rope_|bias_dropout_|use_flashattn).*(fusion|swiglu)|fused_.*|use_cpu_initialization|"
        r"partition_activations|synchronize_each_layer|contiguous_checkpointing|checkpoint_in_cpu|"
        r"deepspeed_activation_checkpointing|profile_backward",
        ONLY_SPEED,
    ),
    (
        r"(use_wandb|use_comet|use_shared_fs|wandb_|comet_|tensorboard|log_|profile|memory_prof|gradient_noise|steps_per_print|wall_clock|"
        r"git_hash|peak_theo|dump_state|char_level|comms_logger|flops_profiler).*",
        ONLY_LOGGING,
    ),
    (
        r"(distributed_backend|local_rank|rank|world_size|lazy_mpu|master_|include|exclude|deepspeed_mpi|"
        r"deepspeed_slurm|deepspeed|user_script|comment|account|force_multi|no_ssh|adlr_|is_pipe|autotuning_run)"
        r".*",
        ONLY_PROCESSES,
    ),
    (
        r"num_workers|mmap_warmup|short_seq_prob|online_data.*|weight_server.*|do_(train|valid|test)|s3_chunk.*",
        ONLY_LOADING,
    ),
    (
        r"text_gen.*|temperature|top_[pk]|maximum_tokens|prompt_end|sample_.*|num_samples|recompute|eval_(results|tasks).*",
        NoEffect("it is for generation; here: megacore generate"),
    ),
)
JSON_KEYS = frozenset(
    [
        "optimizer",
        "scheduler",
        "fp16",
        "bf16",
        "zero_optimization",
        "gradient_clipping",
        "data_types",
        "curriculum_learning",
        "prescale_gradients",
        "gradient_predivide_factor",
        "communication_data_type",
        "fp32_allreduce",
        "amp",
        "elasticity",
        "compression_training",
        "sparse_attention",
        "data_efficiency",
        "zero_allow_untested_optimizer",
        "activation_checkpointing",
    ]
)
"""Keys that NeoX passes on to DeepSpeed."""
NEOX = Rules(TABLE, FAMILIES)
