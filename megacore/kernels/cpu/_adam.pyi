from collections.abc import Sequence

# Lists of addresses and sizes, one of each per tensor; `targets` may be empty.
def adamw(
    weights: Sequence[int],
    gradients: Sequence[int],
    exp_avgs: Sequence[int],
    exp_avg_sqs: Sequence[int],
    targets: Sequence[int],
    sizes: Sequence[int],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    divisor: float,
    threads: int,
    /,
) -> None: ...
def sum_of_squares(tensors: Sequence[int], sizes: Sequence[int], threads: int, /) -> float: ...
