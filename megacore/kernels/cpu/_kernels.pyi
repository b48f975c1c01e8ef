GELU_TANH: int
GELU: int
RELU: int
SILU: int

def forward(
    x: int, x_stride: int, bias: int, y: int, rows: int, cols: int, kind: int, half: bool, threads: int
) -> None: ...
def backward(
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
