"""Inductor's kernels for GPUs that are not there: generated, compiled to machine code, never run.

Inductor writes Triton programs from shapes and types, and Triton compiles them with the `ptxas`
that it contains. Both ask for a driver only to measure and to launch, which is left out.
"""

import contextlib
import copy
import dataclasses
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tests.gpu_emulated import fake_cuda

SHARED_MEMORY = {80: 166912, 90: 232448}
"""Most shared memory of a block, in bytes, by compute capability x 10 (A100, H100)."""


@contextlib.contextmanager
def generated(capability: int, binaries: dict[str, int], failures: list[str]) -> Iterator[None]:
    """Let Inductor compile each graph for a GPU, and run the graph one operator at a time.

    Args:
        capability: compute capability x 10, such as 80 or 90.
        binaries: receives the bytes of machine code of each kernel, by name.
        failures: receives the errors of Inductor, Triton and ptxas.
    """
    import torch._inductor.config
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    fake_cuda.PROPERTIES.major, fake_cuda.PROPERTIES.minor = divmod(capability, 10)
    fake_cuda.PROPERTIES.shared_memory_per_block_optin = SHARED_MEMORY[capability]
    _install_driver(capability)
    torch.cuda._get_device_properties = lambda _=None: fake_cuda.PROPERTIES  # type: ignore[attr-defined]
    torch._C._cuda_getCurrentRawStream = lambda _: 0  # type: ignore[attr-defined]

    def precompile(autotuner: Any, *_: Any, **__: Any) -> None:
        """Compile each variant of a kernel, without launchers."""
        autotuner._precompile_worker()
        for result in autotuner.compile_results:
            binary = result.kernel.asm["cubin"]
            assert result.kernel.metadata.target.arch == capability
            binaries[autotuner.fn.__name__] = binaries.get(autotuner.fn.__name__, 0) + len(binary)

    inductor, inside = compile_fx.compile_fx, [False]

    def compile_and_run_eagerly(graph: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        if inside[0]:  # Inductor calls itself with other settings
            return inductor(graph, inputs, *arguments, **options)
        inside[0] = True
        try:
            inductor(copy.deepcopy(graph), list(inputs), *arguments, **options)
        except Exception as error:
            failures.append("".join(traceback.format_exception(error)))
        finally:
            inside[0] = False
        return aot_eager(graph, list(inputs))

    CachingAutotuner.precompile = precompile  # type: ignore[method-assign]
    compile_fx.compile_fx = compile_and_run_eagerly  # type: ignore[assignment]
    settings = {
        "compile_threads": 1,
        "force_disable_caches": True,  # a cache may have the kernels of another GPU
        "joint_graph_constant_folding": False,  # computes on the GPU
        "use_static_triton_launcher": False,  # loads the machine code into the GPU
    }
    with torch._inductor.config.patch(settings):
        yield


def _install_driver(capability: int) -> None:
    """Let Triton find one driver: that of a GPU with this compute capability."""
    from triton import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        utils = SimpleNamespace(
            get_device_properties=lambda _: {
                "max_shared_mem": SHARED_MEMORY[capability],
                "multiprocessor_count": fake_cuda.PROPERTIES.multi_processor_count,
                "max_num_regs": fake_cuda.PROPERTIES.regs_per_multiprocessor,
                "warpSize": fake_cuda.PROPERTIES.warp_size,
            }
        )

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, fake_cuda.PROPERTIES.warp_size)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: int) -> int:
            return 0

    nvidia = dataclasses.replace(backends.backends["nvidia"], driver=Driver)
    backends.backends.clear()
    backends.backends["nvidia"] = nvidia
    driver.set_active(Driver())
