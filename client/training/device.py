"""Which device trains, and in which precision, with the reason in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["DevicePlan", "plan"]


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The torch device's name, the type that autocast may use (None: float32 throughout), and why."""

    device: str
    amp_dtype: Literal["bfloat16"] | None
    reason: str

    @property
    def precision(self) -> str:
        """The precision's name in reports."""
        return self.amp_dtype or "float32"

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The type that autocast may use, as torch's own value."""
        import torch

        return torch.bfloat16 if self.amp_dtype == "bfloat16" else None


def plan(precision: Literal["auto", "fp32"]) -> DevicePlan:
    """The accelerator if there is a working one, otherwise the CPU.

    bfloat16 is taken only where the device has it in hardware: emulated it is slower than float32, and float16 would
    need loss scaling, which hides gradients that are not finite.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return DevicePlan("cpu", None, "no accelerator is available; reduced precision on a CPU is slower than float32")
    name = str(accelerator)
    if precision == "fp32":
        return DevicePlan(name, None, "the job asks for float32")
    if accelerator.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return DevicePlan(name, "bfloat16", "the device computes bfloat16 in hardware")
    return DevicePlan(name, None, f"no bfloat16 in hardware is known of {accelerator.type}")
