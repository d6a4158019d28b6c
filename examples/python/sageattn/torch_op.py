"""PyTorch operators, which torch.compile keeps in its graph: sageattn::attention and its kin.

    from sageattn import torch_op
    out = torch_op.attention(q, k, v, is_causal=True, layout="HND")

They are torch.ops.sageattn.attention and torch.ops.sageattn.attention_with_lse. There is no backward pass.
Needs PyTorch 2.4 or newer; importing this module imports it.
"""

# No "from __future__ import annotations": the operators' schemas are inferred from annotations.
from typing import Dict, List, Optional, Tuple, Union

import torch

from ._functions import attention as _attention

__all__ = ["attention"]


def _arguments(preset: str, mask: str, window: List[int], layout: str, sm_scale: Optional[float],
               numerics: str) -> Dict[str, object]:
    """Arguments of sageattn.attention from what an operator's schema can hold."""
    fields: Dict[str, Union[str, int]] = {}
    for item in filter(None, numerics.split(",")):
        name, _, value = item.partition("=")
        fields[name] = int(value) if value.lstrip("-").isdigit() else value
    return {"preset": preset, "mask": mask or None, "window": tuple(window) or None, "layout": layout,
            "sm_scale": sm_scale, **fields}


def _lse_shape(q: torch.Tensor, layout: str) -> Tuple[int, int, int]:
    tokens, heads = (1, 2) if layout.lower() == "nhd" else (2, 1)
    return q.shape[0], q.shape[heads], q.shape[tokens]


@torch.library.custom_op("sageattn::attention", mutates_args=())
def _op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, preset: str, mask: str, window: List[int],
        layout: str, sm_scale: Optional[float], numerics: str) -> torch.Tensor:
    arguments = _arguments(preset, mask, window, layout, sm_scale, numerics)
    out: torch.Tensor = _attention(q, k, v, **arguments)  # type: ignore[arg-type]
    return out


@_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, preset: str, mask: str, window: List[int],
      layout: str, sm_scale: Optional[float], numerics: str) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@torch.library.custom_op("sageattn::attention_with_lse", mutates_args=())
def _op_with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, preset: str, mask: str,
                 window: List[int], layout: str, sm_scale: Optional[float],
                 numerics: str) -> Tuple[torch.Tensor, torch.Tensor]:
    arguments = _arguments(preset, mask, window, layout, sm_scale, numerics)
    out, lse = _attention(q, k, v, return_lse=True, **arguments)  # type: ignore[arg-type]
    return out, lse


@_op_with_lse.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, preset: str, mask: str, window: List[int],
      layout: str, sm_scale: Optional[float], numerics: str) -> Tuple[torch.Tensor, torch.Tensor]:
    return (q.new_empty((*q.shape[:-1], v.shape[-1])),
            q.new_empty(_lse_shape(q, layout), dtype=torch.float32))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, preset: str = "auto", causal: bool = False,
              mask: Optional[str] = None, window: Optional[Tuple[int, int]] = None, layout: str = "NHD",
              sm_scale: Optional[float] = None, return_lse: bool = False, **numerics: Union[str, int]
              ) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:
    """sageattn.attention of tensors as one operator; arguments, results and errors as there."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("q, k or v requires grad, but there is no backward pass: call under torch.no_grad(), or "
                         "detach them")
    if causal and mask is not None:
        raise ValueError("causal and mask are given; at most one of causal, mask and window is allowed")
    arguments = (preset, "bottom_right" if causal else mask or "", list(window or ()), layout, sm_scale,
                 ",".join(f"{name}={value}" for name, value in sorted(numerics.items())))
    if return_lse:
        out, lse = torch.ops.sageattn.attention_with_lse(q, k, v, *arguments)
        return out, lse
    result: torch.Tensor = torch.ops.sageattn.attention(q, k, v, *arguments)
    return result
