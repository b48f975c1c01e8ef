"""Tables of the flags of Megatron-LM and of Megatron-DeepSpeed."""

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
    On,
    Rule,
    Rules,
    To,
    integer,
    number,
    positive,
)

_BATCH = Joint("it decides batch sizes and the length of the run")
_SCHEDULE = Joint("it decides the learning-rate schedule")
_SCALING = Joint("it decides how rotary positions are scaled")
_WIDTH = Joint("it decides the MLP's width and activation")
_POSITIONS = Joint("it decides the position embedding")
_TOKENIZER = Joint("it decides the tokenizer")
_RECOMPUTE = Joint("it decides what is recomputed")
_ZERO = Joint("it decides ZeRO")
_PRECISION = Joint("it decides the precision")

_COMMUNICATION = NoEffect("it changes when ranks communicate, not what; it is always done here")
_CHECKED = NoEffect(
    "what is computed again is decided by train.loss_spike_factor, train.loss_spike_action and "
    "train.nonfinite_action"
)
_FORMAT = NoEffect("checkpoints have one form, which any layout loads")
_FOR_EXPERTS = NoEffect("it is for experts, of which there are none without --num-experts")

_DENSE = "a dense model: leave out the flags of experts"
_NO_FP8 = Absent("fp8", "train.precision bf16")
_OTHER_SCALING = Absent(
    "this scaling of rotary positions", "model.rope_scaling of kind yarn", ("1", "1.0")
)
_NO_MLA = Absent("multi-latent attention", "grouped-query attention, model.num_query_groups")
_NO_SSM = Absent("state-space layers (Mamba)", "family gpt")
_INFERENCE = NoEffect("it is for inference; here: megacore generate")
_OPTIMIZER = Joint("it decides the optimizer")
_NO_VISION = Absent("vision models", "family gpt, bert or t5")
_NO_RETRIEVAL = Absent("retrieval models (ICT, RETRO, REALM)", "family bert")
_NO_DISTILLATION = Absent("distillation", "training on the data itself")
_NO_RL = Absent("reinforcement learning", "pretraining or the flow finetune")

ROPE_SCALING: dict[str, Rule] = {
    "--use-rope-scaling": _SCALING,
    "--rope-scaling-factor": _SCALING,
    "--rotary-seq-len-interpolation-factor": _SCALING,
    **dict.fromkeys(
        (
            "--rotary-scaling-factor",
            "--yarn-original-max-position-embeddings",
            "--yarn-beta-fast",
            "--yarn-beta-slow",
            "--mscale",
            "--mscale-all-dim",
        ),
        _OTHER_SCALING,
    ),
}
"""Flags of scaled rotary positions. Those of YaRN are for multi-latent attention."""

MODEL: dict[str, Rule] = {
    "--num-layers": To("model.num_layers", positive),
    "--encoder-num-layers": To("model.num_layers", positive),
    "--decoder-num-layers": To("model.num_decoder_layers", positive),
    "--hidden-size": To("model.hidden_size", positive),
    "--num-attention-heads": To("model.num_attention_heads", positive),
    "--kv-channels": To("model.kv_channels", positive),
    "--group-query-attention": Joint("it decides the key-value heads"),
    "--num-query-groups": Joint("it decides the key-value heads"),
    "--num-key-value-heads": To("model.num_query_groups", positive),
    "--ffn-hidden-size": _WIDTH,
    "--swiglu": _WIDTH,
    "--openai-gelu": _WIDTH,
    "--onnx-safe": _WIDTH,
    "--no-bias-gelu-fusion": _WIDTH,
    "--squared-relu": Absent("squared ReLU", "model.activation relu"),
    "--quick-geglu": Absent("quick GEGLU", "model.activation geglu_tanh"),
    "--glu-linear-offset": Absent(
        "an offset of the gated unit", "model.activation swiglu", ("0", "0.0")
    ),
    "--activation-func-clamp-value": Absent("clamped activations", "model.activation swiglu"),
    "--normalization": Choice(
        "model.normalization",
        {"layernorm": "layernorm", "rmsnorm": "rmsnorm"},
        "this norm",
        "layernorm or rmsnorm",
    ),
    "--norm-epsilon": To("model.layernorm_epsilon", number),
    "--layernorm-epsilon": To("model.layernorm_epsilon", number),
    "--apply-layernorm-1p": Joint("it decides how norms are parametrized"),
    "--qk-layernorm": On("model.qk_layernorm"),
    "--qk-l2-norm": Absent("L2 norms of queries and keys", "model.qk_layernorm"),
    "--disable-bias-linear": On("model.add_bias_linear", False),
    "--add-qkv-bias": Joint("it decides the biases of queries, keys and values"),
    "--untie-embeddings-and-output-weights": On("model.untie_embeddings_and_output_weights"),
    "--position-embedding-type": _POSITIONS,
    "--use-rotary-position-embeddings": _POSITIONS,
    "--no-position-embedding": _POSITIONS,
    "--use-alibi-position-embeddings": _POSITIONS,
    "--rotary-base": To("model.rotary_base", number),
    "--rotary-position-embeddings-theta": To("model.rotary_base", number),
    "--rotary-percent": To("model.rotary_percent", number),
    "--rotary-interleaved": Absent("interleaved rotary pairs", "rotation of halves, the default"),
    "--rope-type": Absent("this rotary embedding", "rope", ("rope",)),
    "--no-rope-freq": Absent("rotary positions in some layers only", "rope in all layers"),
    "--relative-attention-num-buckets": To("model.relative_attention_num_buckets", integer),
    "--relative-attention-max-distance": To("model.relative_attention_max_distance", integer),
    "--window-size": Joint("it decides the attention's window"),
    "--window-attn-skip-freq": Joint("it decides the layers with a window"),
    "--softmax-type": Absent("this softmax", "the plain softmax", ("vanilla",)),
    "--max-position-embeddings": To("model.max_position_embeddings", positive),
    "--hidden-dropout": To("model.hidden_dropout", number),
    "--attention-dropout": To("model.attention_dropout", number),
    "--init-method-std": To("model.init_method_std", number),
    "--init-method-xavier-uniform": Absent("Xavier initialization", "model.init_method_std"),
    "--embedding-init-method-std": Absent(
        "another deviation of embeddings", "model.init_method_std"
    ),
    "--make-vocab-size-divisible-by": Joint("it decides the padding of the vocabulary"),
    "--padded-vocab-size": Absent(
        "a padded size of one's own", "model.make_vocab_size_divisible_by"
    ),
    "--bert-no-binary-head": On("model.bert_binary_head", False),
    "--apply-residual-connection-post-layernorm": Absent(
        "residual connections after the norm", "model.norm_position post, for BERT"
    ),
    "--apply-query-key-layer-scaling": NoEffect("scores are computed in fp32: nothing overflows"),
    "--no-query-key-layer-scaling": NoEffect("scores are computed in fp32: nothing overflows"),
    "--multi-latent-attention": _NO_MLA,
    "--spec": Absent("layers of one's own", "the fields of model"),
    "--enable-gpt-oss": Absent("GPT-OSS", "family gpt"),
    "--use-mcore-models": NoEffect("it selects Megatron's classes"),
    "--use-legacy-models": NoEffect("it selects Megatron's classes"),
    "--transformer-impl": NoEffect("it selects Megatron's kernels; here train.kernels"),
    "--export-force-local-attention": NoEffect("it selects Megatron's kernels"),
    "--export-te-mcore-model": NoEffect("it selects Megatron's layer names"),
    "--mtp-num-layers": Absent("prediction of several tokens", "prediction of the next token"),
}

TRAINING: dict[str, Rule] = {
    "--micro-batch-size": _BATCH,
    "--batch-size": Absent("Megatron's own old name", "--micro-batch-size"),
    "--global-batch-size": _BATCH,
    "--rampup-batch-size": _BATCH,
    "--step-batch-size-schedule": _BATCH,
    "--decrease-batch-size-if-needed": Absent("shrinking batches", "train.rampup_batch_size"),
    "--train-iters": _BATCH,
    "--train-samples": _BATCH,
    "--train-tokens": _BATCH,
    "--seq-length": To("data.seq_length", positive),
    "--encoder-seq-length": To("data.seq_length", positive),
    "--decoder-seq-length": To("data.span_corruption.decoder_seq_length", positive),
    "--lr": To("optim.lr", number),
    "--min-lr": To("optim.min_lr", number),
    "--lr-decay-style": Joint("it decides the learning-rate schedule"),
    "--lr-decay-iters": _SCHEDULE,
    "--lr-decay-samples": _SCHEDULE,
    "--lr-decay-tokens": _SCHEDULE,
    "--lr-warmup-iters": _SCHEDULE,
    "--lr-warmup-samples": _SCHEDULE,
    "--lr-warmup-tokens": _SCHEDULE,
    "--lr-warmup-fraction": _SCHEDULE,
    "--warmup": Absent("Megatron's own old name", "--lr-warmup-fraction"),
    "--lr-warmup-init": To("optim.lr_warmup_init", number),
    "--lr-wsd-decay-style": To("optim.lr_wsd_decay_style"),
    "--lr-wsd-decay-iters": _SCHEDULE,
    "--lr-wsd-decay-samples": _SCHEDULE,
    "--decoupled-lr": Absent("another rate of embedding and head", "optim.lr for all weights"),
    "--decoupled-min-lr": Absent("another rate of embedding and head", "optim.min_lr"),
    "--head-lr-mult": Absent("another rate of the head", "optim.lr", ("1", "1.0")),
    "--weight-decay": To("optim.weight_decay", number),
    "--start-weight-decay": To("optim.start_weight_decay", number),
    "--end-weight-decay": To("optim.end_weight_decay", number),
    "--weight-decay-incr-style": To("optim.weight_decay_incr_style"),
    "--apply-wd-to-qk-layernorm": Absent("decay of norms", "no decay of norms"),
    "--no-weight-decay-cond-type": Absent(
        "weight decay of other weights", "decay of all matrices, but not of norms and biases"
    ),
    "--clip-grad": To("optim.clip_grad", number),
    "--adam-beta1": To("optim.adam_beta1", number),
    "--adam-beta2": To("optim.adam_beta2", number),
    "--adam-eps": To("optim.adam_eps", number),
    "--optimizer": _OPTIMIZER,
    "--sgd-momentum": NoEffect("it is for the optimizer sgd"),
    "--override-opt_param-scheduler": NoEffect("a run's schedule is that of its configuration"),
    "--override-opt-param-scheduler": NoEffect("a run's schedule is that of its configuration"),
    "--override-lr-scheduler": NoEffect("a run's schedule is that of its configuration"),
    "--use-checkpoint-opt_param-scheduler": NoEffect(
        "a run's schedule is that of its configuration"
    ),
    "--use-checkpoint-opt-param-scheduler": NoEffect(
        "a run's schedule is that of its configuration"
    ),
    "--fp16": _PRECISION,
    "--bf16": _PRECISION,
    "--loss-scale": _PRECISION,
    "--initial-loss-scale": To("optim.loss_scale.initial", number),
    "--min-loss-scale": To("optim.loss_scale.minimum", number),
    "--loss-scale-window": To("optim.loss_scale.window", integer),
    "--hysteresis": To("optim.loss_scale.hysteresis", integer),
    "--fp32-residual-connection": Absent("an fp32 residual stream", "train.precision fp32"),
    "--attention-softmax-in-fp32": NoEffect("attention's softmax is always in fp32"),
    "--accumulate-allreduce-grads-in-fp32": NoEffect("gradients are always accumulated in fp32"),
    "--no-accumulate-allreduce-grads-in-fp32": NoEffect("gradients are always accumulated in fp32"),
    "--grad-reduce-in-bf16": On("parallel.grad_reduce_dtype", "bf16"),
    "--fp16-lm-cross-entropy": NoEffect("the loss is always computed in fp32"),
    "--disable-bf16-reduced-precision-matmul": NoEffect("products accumulate in fp32"),
    "--calculate-per-token-loss": Joint("it decides the mean of the loss"),
    "--seed": To("seed", integer),
    "--data-parallel-random-init": Absent("different replicas", "replicas with the same weights"),
    "--eval-interval": To("train.eval_interval", integer),
    "--eval-iters": Joint("it decides the validations"),
    "--log-interval": To("train.log_interval", integer),
    "--exit-interval": To("train.exit_interval", integer, ("0",)),
    "--exit-duration-in-mins": To("train.exit_duration_minutes", number, ("0",)),
    "--exit-signal-handler": NoEffect("a signal always makes a run save and end"),
    "--exit-signal": NoEffect("a signal always makes a run save and end"),
    "--save-interval": Joint("it decides the intervals of checkpoints"),
    "--persistent-save-interval": Joint("it decides the intervals of checkpoints"),
    "--save-retain-interval": To("checkpoint.keep_every", integer),
    "--async-save": On("checkpoint.asynchronous"),
    "--save": DECIDES_START,
    "--load": DECIDES_START,
    "--pretrained-checkpoint": DECIDES_START,
    "--finetune": DECIDES_START,
    "--no-load-optim": DECIDES_START,
    "--no-load-rng": DECIDES_START,
    "--no-load-lr-state": DECIDES_START,
    "--reset-iteration": DECIDES_START,
    "--universal-checkpoint": DECIDES_START,
    "--load-tag": DECIDES_START,
    "--ckpt-step": DECIDES_START,
    "--no-save-optim": Absent("checkpoints without optimizer state", "checkpoint.keep_last"),
    "--no-save-rng": Absent("checkpoints without random state", "complete checkpoints"),
    "--use-checkpoint-args": Absent("a model read from a checkpoint", "megacore import"),
    "--skip-train": Absent("a run without training", "python -m flows.evaluate"),
    "--no-initialization": NoEffect("weights are always initialized"),
    "--use-cpu-initialization": NoEffect("the first weights do not depend on the device"),
    "--perform-initialization": NoEffect("weights are always initialized"),
    "--profile": Joint("it decides the profiled iterations"),
    "--profile-step-start": Joint("it decides the profiled iterations"),
    "--profile-step-end": Joint("it decides the profiled iterations"),
    "--deterministic-mode": On("train.deterministic"),
    "--freeze-all-layers": Absent("frozen layers", "training of all weights"),
    "--iterations-to-skip": Absent("skipped iterations", "train.skip_samples"),
    "--sft": Absent("supervised fine-tuning", "the flow finetune"),
}

RECOMPUTATION: dict[str, Rule] = {
    "--recompute-activations": _RECOMPUTE,
    "--recompute-granularity": _RECOMPUTE,
    "--recompute-method": _RECOMPUTE,
    "--recompute-num-layers": _RECOMPUTE,
    "--recompute-modules": _RECOMPUTE,
    "--checkpoint-activations": _RECOMPUTE,
    "--checkpoint-num-layers": _RECOMPUTE,
    "--activations-checkpoint-method": _RECOMPUTE,
    "--activations-checkpoint-num-layers": _RECOMPUTE,
    "--deepspeed-activation-checkpointing": _RECOMPUTE,
    "--distribute-saved-activations": NoEffect("it divides stored activations: memory only"),
    "--distribute-checkpointed-activations": NoEffect("it divides stored activations: memory only"),
    "--partition-activations": NoEffect("it divides stored activations: memory only"),
    "--contigious-checkpointing": ONLY_SPEED,
    "--checkpoint-in-cpu": NoEffect("it moves stored activations to host memory: memory only"),
    "--synchronize-each-layer": ONLY_SPEED,
    "--profile-backward": ONLY_LOGGING,
}

PARALLEL: dict[str, Rule] = {
    "--tensor-model-parallel-size": To("parallel.tensor_model_parallel_size", positive),
    "--model-parallel-size": Absent("Megatron's own old name", "--tensor-model-parallel-size"),
    "--pipeline-model-parallel-size": To("parallel.pipeline_model_parallel_size", positive),
    "--pipeline-model-parallel-split-rank": To(
        "parallel.pipeline_model_parallel_split_rank", integer
    ),
    "--num-layers-per-virtual-pipeline-stage": Joint("it decides the virtual stages"),
    "--num-virtual-stages-per-pipeline-rank": To(
        "parallel.virtual_pipeline_model_parallel_size", positive
    ),
    "--decoder-first-pipeline-num-layers": Joint("it decides the division into stages"),
    "--decoder-last-pipeline-num-layers": Joint("it decides the division into stages"),
    "--pipeline-model-parallel-layout": Absent("this notation", "parallel.pipeline_partition"),
    "--sequence-parallel": Joint("it decides sequence parallelism"),
    "--use-distributed-optimizer": On("parallel.data_parallel_sharding", "optimizer"),
    "--context-parallel-size": To("parallel.context_parallel_size", positive),
    "--ds-sequence-parallel-size": Absent(
        "sequence parallelism of DeepSpeed (Ulysses)", "parallel.sequence_parallel", ("1",)
    ),
    "--enable-zbh1-pipeline": On("parallel.delay_weight_gradients"),
    "--enable-zbh1-exact-semantics": NoEffect("an update is always exact"),
    "--no-pipeline-parallel": Joint("it decides the pipeline"),
    "--use-torch-fsdp2": Absent(
        "FSDP of torch or Megatron", "parallel.data_parallel_sharding parameters"
    ),
    "--use-megatron-fsdp": Absent(
        "FSDP of torch or Megatron", "parallel.data_parallel_sharding parameters"
    ),
    "--data-parallel-sharding-strategy": Absent(
        "FSDP of Megatron", "parallel.data_parallel_sharding", ("no_shard",)
    ),
    "--expert-model-parallel-size": Absent("expert parallelism", _DENSE, ("1",)),
    "--expert-tensor-parallel-size": Absent("expert parallelism", _DENSE, ("1",)),
    "--optimizer-cpu-offload": Absent(
        "offload in the engine native", "engine deepspeed with offload_optimizer cpu"
    ),
    "--DDP-impl": NoEffect("gradients are summed in buckets that overlap the backward pass"),
    "--ddp-bucket-size": To(
        "parallel.grad_reduce_bucket_mb", lambda text: positive(text) * 4 / 2**20
    ),
    "--check-for-spiky-loss": _CHECKED,
    "--rerun-mode": _CHECKED,
    "--distributed-backend": NoEffect("it is nccl with GPUs, gloo without"),
    "--distributed-timeout-minutes": NoEffect("launch.stall_limit ends a job without progress"),
    "--local-rank": ONLY_PROCESSES,
    "--local_rank": ONLY_PROCESSES,
    "--lazy-mpu-init": ONLY_PROCESSES,
    "--standalone-embedding-stage": Absent(
        "a pipeline stage of the embedding only", "parallel.pipeline_partition balanced"
    ),
    "--account-for-embedding-in-pipeline-split": NoEffect("balanced stages account for it"),
}

DATA: dict[str, Rule] = {
    "--data-path": DECIDES_DATA,
    "--train-data-path": DECIDES_DATA,
    "--valid-data-path": DECIDES_DATA,
    "--test-data-path": DECIDES_DATA,
    "--split": Joint("it decides the data's split"),
    "--data-impl": Absent("this form of data", "Megatron's mmap form", ("mmap", "infer")),
    "--mock-data": Absent("made-up data", "data.source of kind source_tree or prefix"),
    "--data-args-path": Absent("a file of data paths", "data.blend"),
    "--per-split-data-args-path": Absent("a file of data paths", "data.split_blends"),
    "--data-cache-path": ONLY_LOADING,
    "--no-mmap-bin-files": ONLY_LOADING,
    "--mmap-warmup": ONLY_LOADING,
    "--num-workers": ONLY_LOADING,
    "--no-data-sharding": ONLY_LOADING,
    "--num-dataset-builder-threads": ONLY_LOADING,
    "--no-create-attention-mask-in-dataloader": ONLY_LOADING,
    "--dataloader-type": Absent("this order of samples", "one pass in shuffled order", ("single",)),
    "--reset-position-ids": On("data.reset_position_ids"),
    "--reset-attention-mask": On("data.reset_attention_mask"),
    "--eod-mask-loss": On("data.eod_mask_loss"),
    "--mask-prob": Joint("it decides the masked tokens"),
    "--short-seq-prob": Joint("it decides short samples"),
    "--sample-rate": Absent("a part of the samples", "data.split", ("1", "1.0")),
    "--train-data-exact-num-epochs": Absent("a number of epochs", "train.train_iters"),
    "--fim-data": Joint("it decides fill-in-the-middle"),
    "--fim-rate": Joint("it decides fill-in-the-middle"),
    "--fim-spm-rate": Joint("it decides fill-in-the-middle"),
    "--data-efficiency-curriculum-learning": Absent(
        "curriculum learning, which drops tokens", "data.seq_length_schedule, which drops none"
    ),
    "--random-ltd": Absent("dropped tokens in layers", "all tokens in all layers"),
    "--vocab-file": _TOKENIZER,
    "--merge-file": _TOKENIZER,
    "--tokenizer-type": _TOKENIZER,
    "--tokenizer-model": _TOKENIZER,
    "--tokenizer-name-or-path": _TOKENIZER,
    "--vocab-size": Joint("it decides the size of the vocabulary"),
    "--vocab-extra-ids": Joint("it decides the sentinels of the vocabulary"),
    "--tiktoken-pattern": Joint("it decides the tokenizer"),
    "--trust-remote-code": NoEffect("a tokenizer is a file and runs no code"),
    "--repeated-dataloader": ONLY_LOADING,
    "--use-dataset-only": ONLY_LOADING,
}

DEEPSPEED: dict[str, Rule] = {
    "--deepspeed": _ZERO,
    "--deepspeed_config": _ZERO,
    "--deepspeed-config": _ZERO,
    "--zero-stage": _ZERO,
    "--zero-reduce-scatter": _COMMUNICATION,
    "--zero-contigious-gradients": _COMMUNICATION,
    "--zero-reduce-bucket-size": NoEffect("the size of buckets is parallel.grad_reduce_bucket_mb"),
    "--zero-allgather-bucket-size": NoEffect(
        "the size of buckets is parallel.grad_reduce_bucket_mb"
    ),
    "--remote-device": Absent("weights on another device", "deepspeed.offload_param", ("none",)),
    "--use-pin-memory": ONLY_SPEED,
    "--cpu-optimizer": Joint("it decides the optimizer's place"),
    "--cpu_torch_adam": ONLY_SPEED,
    "--ds_fused_adam": ONLY_SPEED,
    "--deepspeed_mpi": ONLY_PROCESSES,
    "--num-experts": Absent("mixture of experts", _DENSE, ("1",)),
    "--mlp-type": Absent("residual experts", _DENSE, ("standard",)),
    "--topk": _FOR_EXPERTS,
    "--expert-interval": _FOR_EXPERTS,
    "--moe-expert-parallel-size": Absent("expert parallelism", _DENSE, ("1",)),
    "--moe-loss-coeff": _FOR_EXPERTS,
    "--moe-train-capacity-factor": _FOR_EXPERTS,
    "--moe-eval-capacity-factor": _FOR_EXPERTS,
    "--moe-min-capacity": _FOR_EXPERTS,
    "--create-moe-param-group": _FOR_EXPERTS,
    "--disable-moe-token-dropping": _FOR_EXPERTS,
    "--enable-expert-tensor-parallelism": _FOR_EXPERTS,
    "--use-tutel": _FOR_EXPERTS,
    "--kd": _NO_DISTILLATION,
    "--mos": _NO_DISTILLATION,
    "--load-teacher": NoEffect("it is for distillation, of which there is none without --kd"),
    "--compression-training": Absent("compression", "training of all weights"),
    "--ds-inference": _INFERENCE,
    "--inference": _INFERENCE,
    "--disable-mem-efficient-ln": ONLY_SPEED,
    "--aml-data-download-path": Absent("a download of data", "data.source of kind http or hub"),
    "--kill-switch-file": Absent("a file that ends the run", "megacore stop"),
    "--return-data-index": ONLY_LOADING,
}

FAMILIES: tuple[tuple[str, Rule], ...] = (
    (r"--export-kd-.*|--logits-load-.*", _NO_DISTILLATION),
    (r"--(kd-.*|.*-teacher)", NoEffect("it is for distillation, which --kd or --mos turns on")),
    (r"--fp[48]-(param|format|hybrid|e4m3).*|--fp8|--fp4.*|--first-last-layers-bf16", _NO_FP8),
    (r"--(no-)?fp8-.*", NoEffect("it is for fp8, which --fp8-format turns on")),
    (
        r"--moe-.*",
        NoEffect("it is for experts, of which there are none without --num-experts"),
    ),
    (r"--(q|kv)-lora-rank|--(qk|v)-(head|pos-emb-head)-dim", _NO_MLA),
    (r"--mamba-.*|--hybrid-.*|--linear-.*|--is-hybrid-model", _NO_SSM),
    (r"--(grpo|rl|langrl)-.*|--perform-rl-step|--refit-method", _NO_RL),
    (
        r"--(ict|biencoder|retriever|retro|evidence|titles|block-data|embedding-path|indexer|bert-load)"
        r".*|--query-in-block-prob|--use-one-sent-docs",
        _NO_RETRIEVAL,
    ),
    (
        r"--(vision|dino|swin|img|patch|iter-per-epoch|num-classes|num-channels|mask-type|mask-factor)"
        r".*|--(classes|data-per-class)-fraction",
        _NO_VISION,
    ),
    (
        r"--(inference|use-legacy-static-engine|max-tokens-to-oom|enable-chunked-prefill).*",
        _INFERENCE,
    ),
    (r"--muon-.*", _OPTIMIZER),
    (r"--lion-.*", NoEffect("it is for the optimizer lion")),
    (
        r"--ds-sequence-parallel-fpdt.*|--force-ds-sequence-parallel",
        Absent("sequence parallelism of DeepSpeed (Ulysses)", "parallel.sequence_parallel"),
    ),
    (
        r"--(train|curriculum)-(idx|desc|doc-idx|sample-idx|shuffle-idx)-path.*",
        Absent("index maps from elsewhere", "the stage index"),
    ),
    (
        r"--hierarchical-context-parallel-sizes|--cp-comm-type",
        NoEffect("context-parallel ranks always gather keys and values here"),
    ),
    (
        r"--(fsdp|megatron-fsdp|outer-dp|use-nccl-ub|init-model-with-meta-device|hsdp|torch-fsdp2).*",
        NoEffect("it is for FSDP, which --use-megatron-fsdp turns on"),
    ),
    (
        r"--(log-|tensorboard|timing|wandb|one-logger|app-tag|otel|no-one-logger|straggler|no-log).*"
        r"|--(logging-level|enable-one-logger|no-barrier.*|memory-snapshot-path"
        r"|record-memory-history|use-pytorch-profiler|profile-ranks|nvtx-ranges)",
        ONLY_LOGGING,
    ),
    (
        r"--(ckpt|dist-ckpt|use-dist-ckpt|auto-detect-ckpt|no-ckpt|non-persistent|use-persistent|"
        r"replication|exit-on-missing-checkpoint|override-ckpt|verify-integrity|strict-fsdp).*",
        _FORMAT,
    ),
    (
        r"--(no-)?(overlap|align|tp-comm|async-tensor|scatter-gather|contiguous|use-ring|batch-p2p|"
        r"ddp-|gradient-reduce|barrier|defer-embedding|delay-wgrad|microbatch-group|"
        r"deallocate-pipeline|variable-seq|nccl-|use-tp-pp|enable-gloo|use-sharp|sharp|"
        r"disable-tp-comm|disable-gloo|fake-process|high-priority|num-distributed-optimizer).*",
        _COMMUNICATION,
    ),
    (
        r"--(no-)?(masked-softmax|bias-dropout|bias-swiglu|rope|gradient-accumulation|persist-layer|"
        r"cross-entropy).*(fusion|norm|impl).*|--(use-flash-attn|use-fused|attention-backend|"
        r"flash-decode|manual-gc|empty-unused|cuda-graph|enable-cuda-graph|external-cuda-graph|"
        r"te-rng-tracker|use-te-rng|cpu-offloading|fine-grained|use-precision-aware|main-grads-dtype|"
        r"no-check-for-nan|check-for|error-injection|gc-|use-transformer-engine-op|"
        r"batch-invariant|force-balance|squared-relu-fusion).*",
        ONLY_SPEED,
    ),
    (
        r"--(no-)?(tokenizer-|use-tokenizer-model|model-temperature).*",
        NoEffect("it follows from the tokenizer"),
    ),
    (
        r"--num-layers-at-(start|end)-in-bf16",
        NoEffect("it is for fp8, which --fp8-format turns on"),
    ),
    (r"--no-rl-.*", _NO_RL),
    (r"--(decode-only|disable-straggler|check-weight-hash).*", ONLY_SPEED),
    (r"--export-.*|--(en|dis)able-modelopt.*", NoEffect("it is for the export of checkpoints")),
    (
        r"--(adlr|inprocess|enable-ft|ft-|calc-ft|fault|run-workload|distributed-init|"
        r"disable-jit|enable-experimental|enable-msc|disable-msc|logits-save|modelopt).*",
        ONLY_PROCESSES,
    ),
)

RARE: tuple[tuple[str, Rule], ...] = (
    (r"--(use-mup|mup-.*)", Absent("µP", "model.init_method_std")),
    (
        r"--mtp-.*",
        NoEffect("it is for prediction of several tokens, which --mtp-num-layers turns on"),
    ),
    (
        r"--(dsa-|mhc-|gdp-|enable-mhc|experimental-attention|attention-output-gate|qk-clip|"
        r"softmax-scale|heterogeneous|hetereogenous).*",
        Absent("this kind of layer", "the fields of model"),
    ),
    (
        r"--(gtp-|expert-gtp|(expert-)?tensor-parallel-num-weight-shards).*",
        Absent("division of weights over further ranks", "engine deepspeed with zero_stage 3"),
    ),
    (
        r"--(use-kitchen|kitchen|quant-recipe|te-precision|tp-only-amax|keep-fp8|reuse-grad-buf|"
        r"activation-func-fp8).*",
        _NO_FP8,
    ),
    (
        r"--(main-params|exp-avg|exp-avg-sq)-dtype",
        Absent("other types of main weights and moments", "fp32", ("fp32",)),
    ),
    (
        r"--(multiple-validation-sets|validation-set-names|full-validation|start-eval-at-iter|"
        r"eval-(global|micro)-batch-size|phase-transition).*",
        Absent("this validation", "train.eval_interval and train.eval_iters"),
    ),
    (
        r"--(fim-.*|dataloader-inter-document-masking|yaml-cfg|per-dataset-sequences-path)",
        Absent("this form of data", "data.fim, data.reset_attention_mask, or flags"),
    ),
    (r"--null-tokenizer-.*", NoEffect("it is for the tokenizer NullTokenizer")),
    (r"--embedding-init-method.*|--embedding-weights-in-fp32", Absent("other embeddings", "model")),
    (r"--(num-experts-switch|disable-moe-top2.*)", _FOR_EXPERTS),
    (
        r"--(split-transformers|scattered-embeddings|memory-centric-tiled-linear|tile-factor|"
        r"profile_steps|memory-efficient|fused|use-te-|use-grouped|use-torch-opt|pin-|no-pin|"
        r"overlap-cpu|optimizer-offload|min-offloaded|offload|activation-offload|delay-offload|"
        r"delta-offload|no-cpu-offload|cache-mla|disable-mamba|disable-parameter|flash-attention|"
        r"mlp-chunks|num-microbatches-with|mla-down|gpu-sniff|wgrad-deferral|optimizer-cuda).*",
        ONLY_SPEED,
    ),
    (
        r"--(async-|distrib-optim|most-recent-k|load-main-params|save-(tokenizer|config|params|"
        r"activations|dgrads|wgrads|tokens)|no-(strict|save-tokenizer)|use-mp-args).*",
        _FORMAT,
    ),
    (
        r"--(flight-recorder|no-flight|pytorch-profiler|record-shapes|memory-keys|modules-to-filter|"
        r"no-filter|set-level|runtime-time|throughput|config-logger|result-rejected|dump-param|"
        r"test-mode).*",
        ONLY_LOGGING,
    ),
    (r"--(bert-embedder-type|output-bert-embeddings|chat-template|sft-tokenizer.*)", _INFERENCE),
    (
        r"--(dataloader-|mid-level|object-storage|allow-ambiguous|tiktoken-|use-gigatoken).*",
        ONLY_LOADING,
    ),
    (
        r"--(suggested-communication|symmetric-ar|pipeline-model-parallel-comm|create-all-gather|"
        r"disable-symmetric|enable-full-sharding|max-seqlen-per|train-sync|no-use-layer-wise|"
        r"account-for-loss|no-clone-scatter|distributed-timeout-seconds).*",
        _COMMUNICATION,
    ),
    (r"--exit-signal-handler-.*", NoEffect("a signal always makes a run save and end")),
    (
        r"--(no-)?yarn-.*|--beta-(fast|slow)|--original-max-position-embeddings|--mrope-section",
        _OTHER_SCALING,
    ),
)
"""Families of flags that scripts rarely have."""

MEGATRON = Rules(
    {
        **MODEL,
        **TRAINING,
        **RECOMPUTATION,
        **PARALLEL,
        **DATA,
        **DEEPSPEED,
        **ROPE_SCALING,
    },
    FAMILIES + RARE,
)
"""Rules of both programs: those of Megatron-DeepSpeed are Megatron-LM's with DEEPSPEED."""
