"""Arrays of other libraries, on their streams: torch, numba and JAX, as far as they are installed."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_helpers import Traffic, assert_same, busy, check, cupy, open_buffer
from multirank import launch

import cupyep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def torch_tensors(comm, dtype):
    """Tensors go in, results become tensors; all of it in the order of torch's stream, without a wait of the host."""
    torch = pytest.importorskip("torch")
    traffic = Traffic(1, dtype=dtype, hidden=48)
    with open_buffer(comm, traffic) as buffer:
        check(buffer, traffic)
        x, topk_idx, weights = (torch.from_dlpack(array) for array in traffic.inputs(0))
        assert x.dtype == getattr(torch, dtype)
        stream = torch.cuda.Stream()
        busy(0)
        cupy.cuda.Device().synchronize()
        with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
            late = torch.zeros_like(x)
            busy(0.1)
            late.copy_(x)
            result = buffer.dispatch(late, topk_idx, weights, num_experts=traffic.num_experts)
            recv_x, recv_weights = torch.from_dlpack(result.recv_x), torch.from_dlpack(result.recv_topk_weights)
            assert recv_x.dtype == x.dtype and recv_x.data_ptr() == result.recv_x.data.ptr
            doubled = recv_x * 2
            home = buffer.combine(doubled, result.handle, recv_weights)
            combined = torch.from_dlpack(home.combined_x)
        stream.synchronize()
        assert_same("recv_x", (cupy.from_dlpack(recv_x),), traffic.received(0)[:1])
        assert_same("combined_x", (cupy.from_dlpack(combined),), traffic.combined(0, 2)[:1])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch(dtype):
    launch.threads(1, torch_tensors, dtype)


def torch_fp8(comm):
    """torch's fp8 travels as uint8 views: CuPy has no such type."""
    torch = pytest.importorskip("torch")
    x = torch.randn(20, 256, device="cuda", dtype=torch.bfloat16)
    topk_idx = torch.zeros(20, 1, device="cuda", dtype=torch.int64)
    torch.cuda.synchronize()
    with cupyep.Buffer(comm, backend="cuda") as buffer:
        data, scales = cupyep.quantize_fp8(x)
        again = torch.from_dlpack(data).view(torch.float8_e4m3fn)
        recv, recv_scales = buffer.dispatch((again.view(torch.uint8), scales), topk_idx, num_experts=1).recv_x
        wide = torch.from_dlpack(cupyep.dequantize_fp8(recv, recv_scales))
        cupy.cuda.get_current_stream().synchronize()
        expected = again.float() * torch.from_dlpack(scales).repeat_interleave(128, dim=1)
        with pytest.raises(TypeError, match=r"^x\[0\]: expected a type that CuPy has .*, got torch.float8_e4m3fn"):
            buffer.dispatch((again, scales), topk_idx, num_experts=1)
        assert torch.equal(wide, expected.bfloat16()) and (wide.float() - x.float()).abs().max() < 0.2


def test_torch_fp8():
    launch.threads(1, torch_fp8)


def other_arrays(comm, library):
    traffic = Traffic(1)
    with open_buffer(comm, traffic) as buffer:
        arrays = traffic.inputs(0)
        if library == "numba":
            cuda = pytest.importorskip("numba.cuda")
            arrays = [cuda.as_cuda_array(array) for array in arrays]
        else:
            jax = pytest.importorskip("jax")
            if jax.default_backend() != "gpu":
                pytest.skip("JAX sees no GPU")
            jax.config.update("jax_enable_x64", True)
            arrays = [jax.dlpack.from_dlpack(array) for array in arrays]
        result = buffer.dispatch(*arrays, num_experts=traffic.num_experts)
        assert_same("recv_x recv_topk_idx recv_topk_weights", result[:3], traffic.received(0))


@pytest.mark.parametrize("library", ["numba", "jax"])
def test_other_libraries(library):
    launch.threads(1, other_arrays, library)


def on_several_gpus(comm):
    """Ranks of one process on different GPUs: peer access is enabled, rows are right. Returns the device."""
    traffic = Traffic(comm.size, num_tokens=300, hidden=512)
    with open_buffer(comm, traffic) as buffer:
        for _ in range(3):
            check(buffer, traffic)
        result = buffer.dispatch(*traffic.inputs(comm.rank), num_experts=traffic.num_experts, layout="expert")
        assert np.isfinite(result.recv_x.get()).all()
        return result.recv_x.device.id


def test_run_local_over_several_gpus():
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("needs two GPUs")
    ranks = 2 * count if count < 4 else count  # two on a GPU, or one
    assert cupyep.run_local(on_several_gpus, ranks, timeout_s=100) == [rank % count for rank in range(ranks)]
