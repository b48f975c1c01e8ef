"""C++ kernels. Addresses are of a tensor's first element, or 0 without a tensor.

Strides are in elements. `half` is True for bf16 and False for fp32.
"""

from collections.abc import Sequence

def runs_fp32() -> bool: ...
def runs_bf16() -> bool: ...
def amd_family() -> int: ...

# activation
GELU_TANH: int
GELU: int
RELU: int
SILU: int

def activation_forward(
    x: int,
    x_stride: int,
    bias: int,
    y: int,
    rows: int,
    cols: int,
    kind: int,
    half: bool,
    threads: int,
) -> None: ...
def activation_backward(
    dy: int,
    dy_stride: int,
    x: int,
    x_stride: int,
    bias: int,
    dx: int,
    dbias: int,
    rows: int,
    cols: int,
    kind: int,
    half: bool,
    threads: int,
) -> None: ...
def gated_forward(
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    y: int,
    rows: int,
    cols: int,
    kind: int,
    half: bool,
    threads: int,
) -> None: ...
def gated_backward(
    dy: int,
    dy_stride: int,
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    dgate: int,
    dup: int,
    rows: int,
    cols: int,
    kind: int,
    half: bool,
    threads: int,
) -> None: ...

# adam
# The lists contain the address and the size of each tensor; `targets` may be empty.
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

# attention
# Address, then the strides of b, n and s.
Place = tuple[int, int, int, int]
# The sizes b, n, g, queries, keys and d.
Sizes = tuple[int, int, int, int, int, int]
# Addresses of the first and last visible key of each query (0: no spans), and their stride of b.
SpanPlace = tuple[int, int, int]

def attention_forward(
    is_bf16: bool,
    sizes: Sizes,
    scale: float,
    causal: bool,
    spans: SpanPlace,
    query: Place,
    key: Place,
    value: Place,
    out: Place,
    lse: int,
    threads: int,
    /,
) -> None: ...
def attention_backward(
    is_bf16: bool,
    sizes: Sizes,
    scale: float,
    causal: bool,
    spans: SpanPlace,
    inputs: tuple[Place, Place, Place, Place, Place],
    lse: int,
    grads: tuple[Place, Place, Place],
    threads: int,
    /,
) -> None: ...

# cross_entropy
def label_statistics(
    logits: int,
    half: bool,
    count: int,
    width: int,
    stride: int,
    columns: int,
    with_sum: bool,
    statistics: int,
    threads: int,
    /,
) -> None: ...
def softmax_gradient(
    logits: int,
    half: bool,
    count: int,
    width: int,
    stride: int,
    columns: int,
    log_normaliser: int,
    factor: int,
    label_weight: float,
    evenly: float,
    threads: int,
    /,
) -> None: ...
def cross_entropy(
    logits: int,
    half: bool,
    count: int,
    width: int,
    stride: int,
    columns: int,
    smoothing: float,
    z_loss: float,
    scale: float,
    losses: int,
    threads: int,
    /,
) -> None: ...

# draw
def bernoulli(
    state: int,
    p: float,
    out: int,
    rows: int,
    length: int,
    ranges: Sequence[tuple[int, int]],
    half: bool,
) -> None: ...

# few_rows
def runs_few_rows() -> bool: ...
def few_rows(
    x: int,
    rows: int,
    in_features: int,
    weight: int,
    out_features: int,
    bias: int,
    share: float,
    y: int,
    threads: int,
    /,
) -> None: ...

# norm
def norm_forward(
    x: int,
    x_stride: int,
    weight: int,
    bias: int,
    y: int,
    mean: int,
    rstd: int,
    rows: int,
    cols: int,
    eps: float,
    centred: bool,
    half: bool,
    threads: int,
) -> None: ...
def norm_backward(
    dy: int,
    dy_stride: int,
    x: int,
    x_stride: int,
    weight: int,
    mean: int,
    rstd: int,
    dx: int,
    dweight: int,
    dbias: int,
    rows: int,
    cols: int,
    centred: bool,
    half: bool,
    threads: int,
) -> None: ...

# residual
def residual_forward(
    branch: int,
    branch_stride: int,
    bias: int,
    residual: int,
    residual_stride: int,
    mask: int,
    mask_stride: int,
    scale: float,
    y: int,
    rows: int,
    cols: int,
    half: bool,
    threads: int,
) -> None: ...
def residual_backward(
    dy: int,
    dy_stride: int,
    mask: int,
    mask_stride: int,
    scale: float,
    dbranch: int,
    dbias: int,
    rows: int,
    cols: int,
    half: bool,
    threads: int,
) -> None: ...

# rope
def rotate(
    x: int,
    x_batch: int,
    x_head: int,
    x_place: int,
    cosines: int,
    sines: int,
    table_stride: int,
    y: int,
    y_batch: int,
    y_head: int,
    y_place: int,
    batch: int,
    heads: int,
    sequence: int,
    size: int,
    rotated: int,
    back: bool,
    half: bool,
    threads: int,
) -> None: ...

# softmax
def softmax_forward(
    scores: int,
    bias: int,
    bias_batch: int,
    bias_head: int,
    bias_query: int,
    kept: int,
    probs: int,
    dropped: int,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    causal: bool,
    scale: float,
    keep_scale: float,
    half: bool,
    threads: int,
) -> None: ...
def softmax_backward(
    grads: int,
    probs: int,
    kept: int,
    dscores: int,
    dbias: int,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    causal: bool,
    scale: float,
    keep_scale: float,
    half: bool,
    threads: int,
) -> None: ...

# weight_grad
def accumulate_weight_grad(
    main_grad: int,
    stride: int,
    dy: int,
    dy_columns: int,
    dy_stride: int,
    x: int,
    x_columns: int,
    x_stride: int,
    rows: int,
    half: bool,
    threads: int,
    /,
) -> None: ...
