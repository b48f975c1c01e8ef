# Addresses of tensors; strides of rows in elements.
def accumulate(
    main_grad: int,
    stride: int,
    dy: int,
    dy_columns: int,
    dy_stride: int,
    x: int,
    x_columns: int,
    x_stride: int,
    rows: int,
    threads: int,
    /,
) -> None: ...
