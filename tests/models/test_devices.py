import pytest
import torch

from tnetcli.errors import UsageError
from tnetcli.models.devices import autocast, choose_device, is_out_of_memory, sharing_cores


def test_auto_selects_an_available_device():
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "quantum:0", "", "meta"])
def test_an_unknown_name_is_a_usage_error(name):
    with pytest.raises(UsageError):
        choose_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_an_error_with_a_hint():
    with pytest.raises(UsageError, match="no `cuda` device") as caught:
        choose_device("cuda")
    assert "auto" in caught.value.hint


def test_bf16_computes_in_bf16_and_fp32_does_not():
    one = torch.ones(2, 2)
    with autocast(torch.device("cpu"), "bf16"):
        assert (one @ one).dtype == torch.bfloat16
    with autocast(torch.device("cpu"), "fp32"):
        assert (one @ one).dtype == torch.float32


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), True),
        (RuntimeError("shapes do not match"), False),
    ],
)
def test_out_of_memory_is_recognised(error, expected):
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(("device", "threads"), [("cpu", 2), ("cuda", 4)])
def test_concurrent_passes_share_the_threads(device, threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        with sharing_cores(2, torch.device(device)):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 4
        with sharing_cores(9, torch.device("cpu")):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
