"""Expressions by which programs that read logs of Megatron-LM and Megatron-DeepSpeed find values.

Some match whole lines, with all fields in Megatron-LM's order, others single fields.
"""

import re

NUMBER = r"([\d.E+\-]+)"
LINE = re.compile(
    r"\[(?P<time>\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2})\]\s+iteration\s+(?P<iteration>\d+)/\s*"
    r"(?P<train_iters>\d+)\s*\|\s*consumed samples:\s*(?P<consumed_samples>\d+)\s*\|\s*"
    r"elapsed time per iteration \(ms\):\s*(?P<ms_per_iteration>[\d.]+)\s*\|\s*"
    r"throughput per GPU \(TFLOP/s/GPU\):\s*(?P<model_tflops>[\d.]+)\s*\|\s*"
    r"learning rate:\s*(?P<lr>\d\.\d+E[+-]\d+)\s*\|\s*"
    r"global batch size:\s*(?P<global_batch_size>\d+)\s*\|\s*"
    r"lm loss:\s*(?P<lm_loss>\d\.\d{6}E[+-]\d+)\s*\|\s*loss scale:\s*(?P<loss_scale>[\d.]+)\s*\|\s*"
    r"grad norm:\s*(?P<grad_norm>[\d.]+)\s*\|\s*"
    r"number of skipped iterations:\s*(?P<skipped_iterations>\d+)\s*\|\s*"
    r"number of nan iterations:\s*(?P<nan_iterations>\d+) \|"
)
"""Line of an iteration of Megatron-LM; the groups have the names of the event's fields."""

FIELDS = {
    "consumed_tokens": rf" consumed tokens: +{NUMBER} \|",
    "seq_length": rf" actual seqlen: +{NUMBER} \|",
    "samples_per_second": rf" samples per second: {NUMBER} \|",
    "tokens_per_second_per_rank": rf" tokens per gpu per second \(tgs\): {NUMBER} \|",
    "tflops": r" TFLOPs: (\S+)",
}
"""Further fields of Megatron-DeepSpeed, by the name of the event's field."""

MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after (\d+) iterations\) memory \(MB\) \| allocated: ([0-9.]+) \| "
    r"max allocated: ([0-9.]+) \| reserved: ([0-9.]+) \| max reserved: ([0-9.]+)"
)
SETUP = re.compile(r"^    ([a-z/-]+) \.+: \(([\d.]+), ([\d.]+)\)$", re.MULTILINE)
"""Line of a timer, with minimum and maximum over the ranks in milliseconds."""
START = re.compile(r"\[before the start of training step\] datetime: (.+)$", re.MULTILINE)
VALIDATION = re.compile(
    rf"validation loss at iteration (\d+) \| lm loss value: {NUMBER} \| lm loss PPL: {NUMBER} \|"
)
