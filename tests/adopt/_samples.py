"""Small scripts and settings files in the style of each program, and their adoption."""

from pathlib import Path

from megacore.adopt.adopt import Adoption, adopt
from megacore.config import RunConfig, load_config

MEGATRON = """\
#!/bin/bash
GPUS_PER_NODE=8
CHECKPOINT_PATH=$1 #<Specify path>
DATA_PATH=$2 #<Specify path and file prefix>_text_document
HIDDEN=1024
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes ${NNODES:-1} --master_port 6000)
MODEL_ARGS=(
    --num-layers 12   # deep enough
    --hidden-size $HIDDEN
    --num-attention-heads $((HIDDEN / 64))
    --seq-length 2048
    --max-position-embeddings 2048
    --group-query-attention
    --num-query-groups 4
    --swiglu
    --normalization RMSNorm
    --use-rotary-position-embeddings
    --rotary-base 500000
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
)
TRAINING_ARGS="
    --micro-batch-size 2 \\
    --global-batch-size 64 \\
    --train-samples 640000 \\
    --lr 3e-4 --min-lr 3e-5 \\
    --lr-decay-style cosine \\
    --lr-warmup-samples 6400 \\
    --weight-decay 0.1 --adam-beta2 0.95 \\
    --bf16
"
if [ -n "$WANDB_API_KEY" ]; then
    TRAINING_ARGS+=" --wandb-project mine"
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} $TRAINING_ARGS \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \\
    --use-distributed-optimizer --overlap-grad-reduce \\
    --data-path 0.7 $DATA_PATH 0.3 /data/code_text_document --split 99,1,0 \\
    --tokenizer-type Llama2Tokenizer --tokenizer-model /data/tokenizer.model \\
    --recompute-granularity selective --log-interval 10 --eval-iters 20 --save-interval 500 \\
    --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH
"""

BERT = """\
python pretrain_bert.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 \\
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --lr 1e-4 \\
    --train-iters 100 --lr-warmup-fraction .01 --fp16 --loss-scale 1024 --data-path /data/a \\
    --vocab-file /data/vocab.txt --mask-prob 0.2 --eval-iters 0
"""

DEEPSPEED_SCRIPT = """\
#!/bin/bash
MBS=4; GBS=128; SEQ=1024
STAGE=${ZERO:-2}
cat <<EOT > ds.json
{
  "train_batch_size": $GBS,
  "train_micro_batch_size_per_gpu": $MBS,
  "gradient_clipping": 0.5,
  "steps_per_print": 10,
  "zero_optimization": {"stage": $STAGE, "offload_optimizer": {"device": "cpu"},
                        "reduce_bucket_size": 200000000},
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 11}
}
EOT
options=" \\
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length $SEQ \\
    --max-position-embeddings $SEQ --micro-batch-size $MBS --global-batch-size $GBS \\
    --train-tokens $((300 * 1000000)) --train-samples 1000000 --lr-warmup-tokens 3000000 \\
    --lr-decay-tokens 260000000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine \\
    --clip-grad 1.0 --fp16 --data-path /data/pile_text_document --data-impl mmap \\
    --vocab-file /data/vocab.json --merge-file /data/merges.txt --hysteresis 2"
options="${options} --deepspeed --deepspeed_config ds.json --zero-stage $STAGE \\
    --checkpoint-activations --deepspeed-activation-checkpointing --no-pipeline-parallel"
cmd="deepspeed --num_gpus 8 pretrain_gpt.py ${options} &> log.txt"
echo $cmd
eval $cmd
"""

NEOX_MODEL = """\
{
  "pipe-parallel-size": 0, "model-parallel-size": 2,
  # a comment, as JSON has none
  "num-layers": 12, "hidden-size": 768, "num-attention-heads": 12,
  "seq-length": 2048, "max-position-embeddings": 2048,
  "pos-emb": "rotary", "rotary-pct": 0.25, "no-weight-tying": true, "gpt-j-residual": true,
  "attention-config": [[["flash"], 12]], "norm": "layernorm",
  "bias-gelu-fusion": true, "scaled-upper-triang-masked-softmax-fusion": true,
  "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "min_lr": 0.00006,
  "zero_optimization": {"stage": 1, "overlap_comm": true, "cpu_offload": false},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
  "gradient_clipping": 1.0, "weight-decay": 0.1,
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 2},
  "train-iters": 1000, "lr-decay-iters": 1000, "lr-decay-style": "cosine", "warmup": 0.02,
  "checkpoint-activations": true, "checkpoint-num-layers": 1, "checkpoint-factor": 100,
  "keep-last-n-checkpoints": 4, "eval-interval": 100, "eval-iters": 10, "log-interval": 10,
}
"""
NEOX_PATHS = """\
data-path: data/pile_text_document
vocab-file: data/20B_tokenizer.json
tokenizer_type: HFTokenizer
split: 969,30,1
save: checkpoints
load: checkpoints
use_wandb: false
"""

NANOTRON = """\
checkpoints:
  checkpoint_interval: 1000
  checkpoints_path: checkpoints
  resume_checkpoint_path: null
data_stages:
- name: all
  start_training_step: 1
  data:
    num_loading_workers: 1
    seed: 42
    dataset:
      hf_dataset_or_datasets: some-team/stories
      hf_dataset_splits: train
      text_column_name: text
general: {project: p, run: r, seed: 42}
logging: {iteration_step_info_interval: 1, log_level: info}
model:
  dtype: bfloat16
  ddp_bucket_cap_mb: 25
  init_method: {std: 0.025}
  make_vocab_size_divisible_by: 1
  model_config:
    bos_token_id: 1
    hidden_act: silu
    hidden_size: 512
    initializer_range: 0.02
    intermediate_size: 1376
    is_llama_config: true
    max_position_embeddings: 2048
    num_attention_heads: 8
    num_hidden_layers: 6
    num_key_value_heads: 4
    rms_norm_eps: 1.0e-05
    rope_scaling: null
    tie_word_embeddings: true
    vocab_size: 32000
optimizer:
  clip_grad: 1.0
  weight_decay: 0.01
  zero_stage: 1
  accumulate_grad_in_fp32: true
  optimizer_factory: {name: adamW, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-08}
  learning_rate_scheduler:
    learning_rate: 0.0003
    lr_decay_starting_step: null
    lr_decay_steps: 980
    lr_decay_style: cosine
    lr_warmup_steps: 20
    lr_warmup_style: linear
    min_decay_lr: 3.0e-05
parallelism: {dp: 2, tp: 2, pp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}
tokenizer: {tokenizer_name_or_path: some-team/tokenizer, tokenizer_revision: null}
tokens:
  batch_accumulation_per_replica: 4
  micro_batch_size: 2
  sequence_length: 1024
  train_steps: 1000
  val_check_interval: -1
"""

FILES = {
    "megatron.sh": MEGATRON,
    "bert.sh": BERT,
    "deepspeed.sh": DEEPSPEED_SCRIPT,
    "neox.yml": NEOX_MODEL,
    "nanotron.yaml": NANOTRON,
}


GPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 "
    "--num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 "
    "--global-batch-size 16 --train-iters 100 --lr 1e-4 --data-path /d/a --vocab-file /d/v.json "
    "--merge-file /d/m.txt "
)


def adopted(tmp_path: Path, name: str, text: str, *more: str, **options: object) -> Adoption:
    """Adopt a file with this text, together with further files of GPT-NeoX."""
    path = tmp_path / name
    path.write_text(text)
    paths = [path]
    for number, content in enumerate(more):
        paths.append(tmp_path / f"more{number}{path.suffix}")
        paths[-1].write_text(content)
    return adopt(paths, **options)  # type: ignore[arg-type]


def config_of(tmp_path: Path, result: Adoption) -> RunConfig:
    """Load the written text with the loader of configurations."""
    assert result.text, result.draft and [each.text for each in result.draft.refused]
    target = tmp_path / "adopted.yaml"
    target.write_text(result.text)
    return load_config(str(target))


def gpt(tmp_path: Path, flags: str, **options: object) -> Adoption:
    return adopted(tmp_path, "gpt.sh", GPT + flags, **options)


def config(tmp_path: Path, flags: str) -> RunConfig:
    return config_of(tmp_path, gpt(tmp_path, flags))


def refusals(result: Adoption) -> list[str]:
    assert result.draft is not None
    return [each.text for each in result.draft.refused]
