"""Windows and scaled rotary positions of Megatron-LM's attention."""

from megacore.adopt.rules import BadValueError, Draft, first, integer, number_of
from megacore.adopt.settings import Settings

_LLAMA3_FACTOR = 8.0
"""Megatron's default of --rope-scaling-factor."""


def put_window(settings: Settings, draft: Draft) -> None:
    """Set the window, whose left side does not count the token itself, and the layers without it.

    As here, every n-th layer has no window.
    """
    window, skip = settings.get("--window-size"), settings.get("--window-attn-skip-freq")
    every: int | None = None
    if skip is not None and window is None:
        draft.ignore(skip, "Megatron reads it with --window-size only")
    elif skip is not None:
        try:
            every = integer(first(skip))
        except BadValueError:
            every = 0
        if every < 1 or len(skip.words) != 1:
            draft.refuse(skip, "a list of layers with a window", "model.window_attn_skip_freq N")
            every = None
    if window is None:
        return
    sizes = " ".join(window.words).strip("()'\" ").replace(",", " ").split()
    if len(sizes) != 2 or sizes[1] != "0" or not sizes[0].isdecimal():
        draft.refuse(window, "a window after the token", "model.sliding_window")
        if skip is not None and skip.name not in draft.done:
            draft.ignore(skip, "the window is refused")
    elif skip is not None and every == 1:
        draft.ignore(window, f"{skip} leaves no layer with a window")
        draft.ignore(skip, "no layer has a window")
    else:
        draft.put("model.sliding_window", int(sizes[0]) + 1, window)
        if skip is not None and every is not None:
            draft.put("model.window_attn_skip_freq", every, skip)


def put_rope_scaling(settings: Settings, draft: Draft) -> None:
    """Set the scaling of rotary positions: Llama 3's, or positions divided by a number."""
    llama, factor = settings.get("--use-rope-scaling"), settings.get("--rope-scaling-factor")
    linear = settings.get("--rotary-seq-len-interpolation-factor")
    given = [each for each in (llama, factor, linear) if each is not None]
    if draft.get("model.position_embedding_type") != "rope":
        for each in given:
            draft.ignore(each, "the model has no rotary positions")
        return
    name = "model.rope_scaling"
    divisor = number_of(linear, draft, f"{name}.factor")
    if linear is not None and divisor == 1:
        draft.ignore(linear, "it requests nothing")
        linear = None
    if llama is not None and linear is not None:
        draft.refuse(linear, f"two scalings at once, with {llama}", "one of them")
        linear = None
    if llama is not None:
        value = number_of(factor, draft, f"{name}.factor")
        if factor is None or value is not None:
            draft.put(f"{name}.kind", "llama3", llama)
            origin = factor or f"Megatron-LM's default {_LLAMA3_FACTOR:g}"
            draft.put(f"{name}.factor", _LLAMA3_FACTOR if value is None else value, origin)
    elif factor is not None:
        draft.ignore(factor, "Megatron reads it with --use-rope-scaling only")
    if linear is not None and divisor is not None:
        draft.put(f"{name}.kind", "linear", linear)
        draft.put(f"{name}.factor", divisor, linear)
