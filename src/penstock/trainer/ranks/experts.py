# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: each rank of a group of `ep` holds some experts of every layer, and tokens
travel to the experts that they visit and back.

Owns which experts a rank holds and the two exchanges of a layer. The router, the choice of experts
and the products stay the model's own. Gradients of an expert come from the tokens of all ranks of
the group, through the exchange; FSDP sums them over the groups.

P = tokens of the line, V = visits: a token and one expert that it chose, G = visits that this rank
computes, E = experts, K = experts per token, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from penstock.errors import ConfigError


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that hold all experts of a layer, fused, as transformers marks them."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def spread_experts(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Keep this rank's experts of every layer, and let tokens travel; the modules are changed in
    place. `mesh`: the ranks of one group."""
    found = expert_modules(model)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no fused experts to spread over ep {mesh.size()} ranks; "
            "set ep to 1"
        )
    for module in found:
        num_experts = cast(int, module.num_experts)
        if num_experts % mesh.size():
            raise ConfigError(
                f"ep {mesh.size()} cannot share {num_experts} experts evenly; set ep to a divisor "
                f"of {num_experts}"
            )
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.shape[:1] != (num_experts,):
                raise ConfigError(
                    f"{type(module).__name__}.{name} is not cut by experts; set ep to 1"
                )
            own = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(own, parameter.requires_grad))
        cast(Any, module).num_experts = num_experts // mesh.size()
        module.forward = _travelling(module, mesh.get_group(), num_experts)


def shard_dim(parameter: nn.Parameter, num_parts: int) -> Shard:
    """How FSDP cuts what a rank holds of the experts: by experts, or inside each if those do not
    divide."""
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    is_inside = held.shape[0] % num_parts != 0 and held.shape[1] % num_parts == 0
    return Shard(1 if is_inside else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """The visits that this rank sends and receives, by rank of the group."""

    sent: list[int]
    received: list[int]
    experts_G: Tensor
    """Which of this rank's experts each received one is for."""


def count_visits(experts_V: Tensor, num_experts: int, group: dist.ProcessGroup) -> Visits:
    """experts_V: ascending. The ranks of the group tell each other how many visits will come."""
    ep = group.size()
    going_E = torch.bincount(experts_V, minlength=num_experts)
    coming_E = torch.empty_like(going_E)
    dist.all_to_all_single(coming_E, going_E, group=group)
    sent, received = torch.stack([going_E, coming_E]).view(2, ep, -1).sum(dim=2).tolist()
    own_E = torch.arange(num_experts // ep, device=experts_V.device).repeat(ep)
    experts_G = own_E.repeat_interleave(coming_E, output_size=sum(received))
    return Visits(sent=sent, received=received, experts_G=experts_G)


def _travelling(
    module: nn.Module, group: dist.ProcessGroup, num_experts: int
) -> Callable[..., Tensor]:
    """The forward pass of a layer's experts, of which this rank holds some."""
    forward = module.forward

    def run(hidden_PD: Tensor, chosen_PK: Tensor, weights_PK: Tensor) -> Tensor:
        num_tokens, num_chosen = chosen_PK.shape
        experts_V, order_V = chosen_PK.reshape(-1).sort(stable=True)
        visits = count_visits(experts_V, num_experts, group)
        going_VD = hidden_PD.index_select(0, order_V // num_chosen)
        here_GD = exchange(going_VD, visits.sent, visits.received, group)
        made_GD = _compute(module, forward, here_GD, visits.experts_G)
        back_VD = exchange(made_GD, visits.received, visits.sent, group)
        place_V = torch.empty_like(order_V)
        place_V[order_V] = torch.arange(order_V.numel(), device=order_V.device)
        made_PKD = back_VD.index_select(0, place_V).view(num_tokens, num_chosen, -1)
        return (made_PKD * weights_PK[..., None]).sum(dim=1).to(hidden_PD.dtype)

    return run


def _compute(
    module: nn.Module, forward: Callable[..., Tensor], states_GD: Tensor, experts_G: Tensor
) -> Tensor:
    """The module's own products over its local experts, each row for one of them."""
    table = cast(dict[str, Any], module._parameters)  # pyright: ignore[reportPrivateUsage]
    held = dict(table)
    try:
        table |= {name: one.to_local() for name, one in held.items() if isinstance(one, DTensor)}
        return forward(states_GD, experts_G[:, None], states_GD.new_ones(len(experts_G), 1))
    finally:
        table |= held


def exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send this many rows to each rank of the group and return what it received from each; a
    gradient goes the way back."""
    return cast(Any, _Exchange).apply(rows, sent, received, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way_back = (received, sent, group)
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], *ctx.way_back), None, None, None


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found
