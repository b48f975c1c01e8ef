"""AdamW (Loshchilov and Hutter 2019) over fp32 main weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megacore.config.optim import OptimConfig
from megacore.optim.param_groups import param_groups


class MainWeightAdamW:
    """Updates fp32 main weights with torch's fused kernel and writes them back to the model.

    Where the model computes in fp32, its weights are the main weights and nothing is copied. The kernel is called
    directly: `torch.optim.AdamW(fused=True)` calls the same one, but its wrapper takes seconds to import.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimConfig, dtype: torch.dtype) -> None:
        """Take over a model's parameters and cast them to the compute type; the main weights keep their bits.

        Args:
            parameters: fp32, by global name, each tied parameter once.
            config: betas, epsilon and weight decay; the learning rate is given to `step`.
            dtype: type of the model's weights from now on.
        """
        self._config = config
        self._parameters = dict(parameters)
        self.main_weights = {name: parameter.data for name, parameter in self._parameters.items()}
        self.exp_avg = {name: torch.zeros_like(weight) for name, weight in self.main_weights.items()}
        self.exp_avg_sq = {name: torch.zeros_like(weight) for name, weight in self.main_weights.items()}
        self._groups = param_groups(self._parameters.items(), config.weight_decay)
        self._copies = dtype != torch.float32
        self.steps = 0
        """Updates made so far; it corrects the bias of the moments."""
        for parameter in self._parameters.values():
            parameter.data = parameter.data.to(dtype)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Make one update.

        Args:
            gradients: fp32, by global name, shaped like the parameters.
            lr: learning rate of this update.
        """
        for group in self._groups:
            weights = [self.main_weights[name] for name in group.names]
            # The kernel reads the number of the present step, and wants it once per tensor.
            step = torch.full((), float(self.steps + 1), device=weights[0].device)
            torch._fused_adamw_(
                weights,
                [gradients[name] for name in group.names],
                [self.exp_avg[name] for name in group.names],
                [self.exp_avg_sq[name] for name in group.names],
                [],
                [step] * len(weights),
                lr=lr,
                beta1=self._config.adam_beta1,
                beta2=self._config.adam_beta2,
                weight_decay=group.weight_decay,
                eps=self._config.adam_eps,
                amsgrad=False,
                maximize=False,
            )
        self.steps += 1
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the main weights into a model of lower precision; to be called after they were loaded, too."""
        if self._copies:
            targets = [self._parameters[name].data for name in self.main_weights]
            torch._foreach_copy_(targets, list(self.main_weights.values()))

    def tensors(self) -> dict[str, Tensor]:
        """Main weights and moments under the names of a checkpoint: they are loaded in place."""
        kinds = {
            "model": self.main_weights,
            "optimizer.exp_avg": self.exp_avg,
            "optimizer.exp_avg_sq": self.exp_avg_sq,
        }
        return {f"{kind}.{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}
