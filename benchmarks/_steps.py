"""One training step of each contestant, all with the same initial weights and batches."""

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._entrants import BETAS, CLIP, LR, STD, WEIGHT_DECAY, Case, Work
from benchmarks._nanogpt import NanoGpt
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.convert.hf import gpt2, llama

Step = Callable[[], "Tensor | float"]
"""Function that makes one step and returns its loss; a tensor that is not read does not synchronize
the GPU."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BATCHES = 64
_NOISE = 0.1
"""Share of tokens that follow no pattern."""
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Weights that are [in, out] in transformers' GPT-2 and [out, in] in nanoGPT."""


def batches(case: Case, device: torch.device) -> list[Tensor]:
    """Return ids [b, s + 1] of consecutive steps.

    Each row counts up by a random stride, with some noise.
    """
    random = torch.Generator().manual_seed(1)

    def drawn(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=random)

    steps = []
    for _ in range(_BATCHES):
        b, width = case.micro_batch_size, case.seq_length + 1
        rows = drawn(case.vocab_size, b, 1) + (1 + drawn(4, b, 1)) * torch.arange(width)
        noise = torch.rand(b, width, generator=random) < _NOISE
        steps.append(
            torch.where(noise, drawn(case.vocab_size, b, width), rows % case.vocab_size).to(device)
        )
    return steps


def initial_weights(case: Case) -> dict[str, Tensor]:
    """Return initial weights with transformers' names.

    GPT-2's are those of Radford et al. 2019, and its linear layers are [in, out].
    """
    if case.model == "llama":
        return _llama_weights(case)
    random = torch.Generator().manual_seed(2)
    h, deep = case.hidden, STD / math.sqrt(2 * case.layers)

    def normal(*shape: int, std: float = STD) -> Tensor:
        return torch.empty(shape).normal_(0.0, std, generator=random)

    weights = {
        "transformer.wte.weight": normal(case.vocab_size, h),
        "transformer.wpe.weight": normal(case.seq_length, h),
    }
    norms = ["transformer.ln_f"]
    for layer in range(case.layers):
        block = f"transformer.h.{layer}"
        norms += [f"{block}.ln_1", f"{block}.ln_2"]
        for name, size, std in (
            ("attn.c_attn", (h, 3 * h), STD),
            ("attn.c_proj", (h, h), deep),
            ("mlp.c_fc", (h, 4 * h), STD),
            ("mlp.c_proj", (4 * h, h), deep),
        ):
            weights |= {
                f"{block}.{name}.weight": normal(*size, std=std),
                f"{block}.{name}.bias": torch.zeros(size[1]),
            }
    return (
        weights
        | {f"{norm}.weight": torch.ones(h) for norm in norms}
        | {f"{norm}.bias": torch.zeros(h) for norm in norms}
    )


def _llama_weights(case: Case) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(2)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in transformers_model(case).named_parameters()}
    return {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.empty(shape).normal_(0.0, STD, generator=random)
        for name, shape in shapes.items()
    }


def megacore_step(work: Work, device: torch.device) -> tuple[Step, dict[str, str]]:
    """Return a function that makes a step of megacore's engine, and the kernels in use."""
    from megacore.engine.build import build_engine
    from megacore.parallel.mesh import ProcessMesh

    case, config = work.case, work.config()
    tokens = SpecialTokens(eod=case.vocab_size - 1)
    mesh = ProcessMesh.serial()
    engine = build_engine(
        config,
        case.vocab_size,
        mesh,
        special_tokens=tokens,
        device=device,
        precision=work.precision,
    )
    hf_weights = initial_weights(case)
    tensors = engine.tensors()
    key_map = (llama if case.model == "llama" else gpt2).key_map
    ours = key_map(ModelSpec.of(config, case.vocab_size, tokens)).ours(hf_weights)
    for name, value in ours.items():
        target = tensors[f"model.{name}"]
        assert isinstance(target, Tensor), "one rank holds everything whole"
        target.copy_(value.view_as(target))
    engine.load_state(engine.state(), tensors)
    batch_stream = cycle(batches(case, device))

    def step() -> float:
        engine.forward_backward(iter([next(batch_stream)]), [0])
        return engine.update(LR, WEIGHT_DECAY).loss

    return step, engine.kernels


def nanogpt_step(work: Work, device: torch.device) -> Step:
    """Return a function that makes a step like nanoGPT's train.py.

    The model is our plain one in nanoGPT's style, or that of a checkout.
    """
    case = work.case
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    model: nn.Module = (
        NanoGpt(case) if work.checkout is None else _checkout_model(work.checkout, case)
    )
    model.load_state_dict(_for_nanogpt(initial_weights(case)))
    model.to(device)
    optimizer = _adamw(model, fused=work.entrant.fused or device.type == "cuda")
    scaler = torch.amp.GradScaler(device.type, enabled=case.precision == "fp16")
    called: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = (
        torch.compile(model) if work.entrant.compiled else model
    )
    pairs = [
        (batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in batches(case, device)
    ]
    batch_stream = cycle(pairs)

    def step() -> Tensor:
        with autocast(case, device):
            _, loss = called(*next(batch_stream))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def fsdp2_step(work: Work, device: torch.device) -> Step:
    """Return a function that makes a step of torch's FSDP2, in a world of one rank.

    As in torchtitan (https://github.com/pytorch/torchtitan), parameters are fp32 and computed with
    in the case's precision, and layers and the loss are compiled.
    """
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    case = work.case
    torch.set_float32_matmul_precision("high")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1
    )
    model: Any
    if case.model == "llama":
        model = transformers_model(case)
        model.load_state_dict(initial_weights(case))
        layers = model.model.layers
    else:
        model = NanoGpt(case)
        model.load_state_dict(_for_nanogpt(initial_weights(case)))
        layers = model.transformer["h"]
    model.to(device)
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES.get(case.precision), reduce_dtype=torch.float32
    )
    for layer in layers:
        if work.entrant.compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = _adamw(model, fused=work.entrant.fused)
    loss_of: Callable[[Tensor, Tensor], Tensor] = _loss_in_fp32
    if work.entrant.compiled:
        loss_of = torch.compile(_loss_in_fp32)
    batch_stream = cycle(batches(case, device))

    def step() -> Tensor:
        batch = next(batch_stream)
        ids, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        logits = model(ids).logits if case.model == "llama" else model(ids, None)[0]
        loss = loss_of(logits, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _loss_in_fp32(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def transformers_model(case: Case) -> Any:
    """Build transformers' model with its defaults, except dropout, which the others lack."""
    if case.model == "llama":
        return _llama(case)
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=case.vocab_size,
        n_positions=case.seq_length,
        n_embd=case.hidden,
        n_layer=case.layers,
        n_head=case.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=case.vocab_size - 1,
        eos_token_id=case.vocab_size - 1,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # its own loss, which this configuration does not name
    weights = initial_weights(case)
    model.load_state_dict(weights | {"lm_head.weight": weights["transformer.wte.weight"]})
    return model.train()


def _llama(case: Case) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=case.vocab_size,
        hidden_size=case.hidden,
        intermediate_size=case.inner or 4 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.groups or case.heads,
        max_position_embeddings=case.seq_length,
        rms_norm_eps=1e-5,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def transformers_inputs(batch: Tensor) -> dict[str, Tensor]:
    """Return the model's inputs with shifted targets, so that it has as many as the others."""
    targets = batch[:, 1:].contiguous()
    return {"input_ids": batch[:, :-1].contiguous(), "labels": targets, "shift_labels": targets}


def transformers_step(work: Work, device: torch.device) -> Step:
    """Return a function that makes a step like Trainer's default loop, without accelerate."""
    case = work.case
    model = transformers_model(case).to(device)
    optimizer = _adamw(model, fused=work.entrant.fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    input_stream = endless(case, device)

    def step() -> Tensor:
        with autocast(case, device):
            loss = model(**next(input_stream)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        model.zero_grad()
        detached: Tensor = loss.detach()
        return detached

    return step


def _adamw(model: nn.Module, *, fused: bool) -> torch.optim.AdamW:
    """Return torch's AdamW, which does not decay vectors."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=fused or None)


def autocast(case: Case, device: torch.device) -> Any:
    """Return the autocast context of the case's precision, as used by both peers."""
    if case.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[case.precision])


def _for_nanogpt(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    transposed = {
        name: value.t() if name.endswith(_TRANSPOSED) else value for name, value in weights.items()
    }
    return transposed | {"lm_head.weight": weights["transformer.wte.weight"]}


def _checkout_model(checkout: str, case: Case) -> nn.Module:
    path = Path(checkout, "model.py")
    spec = importlib.util.spec_from_file_location("nanogpt_checkout", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"{path} is not there: give --nanogpt a checkout of nanoGPT")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=case.seq_length,
        vocab_size=case.vocab_size,
        n_layer=case.layers,
        n_head=case.heads,
        n_embd=case.hidden,
        dropout=0.0,
        bias=True,
    )
    model: nn.Module = module.GPT(config)
    return model


def endless(case: Case, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Return an endless iterator of inputs of transformers' model."""
    return cycle([transformers_inputs(batch) for batch in batches(case, device)])
