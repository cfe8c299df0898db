from types import SimpleNamespace

import pytest
import torch

from client.training.device import DevicePlan, plan


def test_without_an_accelerator_the_cpu_trains_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan says why."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *, check_available: None)  # noqa: ARG005 - torch's
    found = plan("auto")
    assert found == DevicePlan(
        "cpu", None, "no accelerator is available; reduced precision on a CPU is slower than float32"
    )
    assert found.precision == "float32"
    assert found.torch_dtype is None


@pytest.mark.parametrize(
    ("kind", "hardware", "asked", "precision", "reason"),
    [
        ("cuda", "yes", "auto", "bfloat16", "the device computes bfloat16 in hardware"),
        ("cuda", "", "auto", "float32", "no bfloat16 in hardware is known of cuda"),
        ("mps", "yes", "auto", "float32", "no bfloat16 in hardware is known of mps"),
        ("cuda", "yes", "fp32", "float32", "the job asks for float32"),
    ],
)
def test_an_accelerator_is_used_and_in_bfloat16_only_where_it_has_it(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    hardware: str,
    asked: str,
    precision: str,
    reason: str,
) -> None:
    """A job can ask for float32; emulated bfloat16 is never taken."""

    class Device(SimpleNamespace):
        type = kind

        def __str__(self) -> str:
            return f"{kind}:0"

    device = Device()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *, check_available: device)  # noqa: ARG005 - torch's
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: bool(hardware))  # noqa: ARG005 - torch's
    found = plan("fp32" if asked == "fp32" else "auto")
    assert (found.device, found.precision, found.reason) == (f"{kind}:0", precision, reason)
    assert found.torch_dtype is (torch.bfloat16 if precision == "bfloat16" else None)
