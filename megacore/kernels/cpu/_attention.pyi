Place = tuple[int, int, int, int]
Sizes = tuple[int, int, int, int, int, int]

def forward(
    is_bf16: bool,
    sizes: Sizes,
    scale: float,
    causal: bool,
    query: Place,
    key: Place,
    value: Place,
    out: Place,
    lse: int,
    threads: int,
    /,
) -> None: ...
def backward(
    is_bf16: bool,
    sizes: Sizes,
    scale: float,
    causal: bool,
    inputs: tuple[Place, Place, Place, Place, Place],
    lse: int,
    grads: tuple[Place, Place, Place],
    threads: int,
    /,
) -> None: ...
