"""What the preflight asks of CUDA. Every function returns plain values, may raise, and runs in a process of its own."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from cupyep import env

_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 40.0
_OWNER_MARK, _READER_MARK = 1, 101  # byte values, plus the device


def wheels() -> list[str]:
    """The installed CuPy distributions, "cupy-cuda12x 14.2.0"; more than one break each other. Imports nothing."""
    found = ((dist.metadata["Name"] or "", dist.version) for dist in importlib.metadata.distributions())
    return sorted({f"{name} {version}" for name, version in found if re.fullmatch(r"cupy(-.+)?", name.lower())})


def device_files() -> int:
    """How many GPUs have a device file: shows one even where no library can."""
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))


def libraries() -> dict[str, Any]:
    """Versions of CuPy and of NVRTC; needs no GPU."""
    import cupy
    from cupy.cuda import nvrtc

    return {"version": cupy.__version__, "nvrtc": ".".join(map(str, nvrtc.getVersion()))}


def gpus() -> dict[str, Any]:
    """Driver and physical GPUs, from NVML, else from the driver's own library. Makes no context."""
    errors = []
    for ask in (_gpus_of_nvml, _gpus_of_driver):
        try:
            return ask()
        except Exception as error:
            errors.append(f"{ask.__name__.rpartition('_')[2]}: {error}")
    raise RuntimeError("; ".join(errors))


def _gpus_of_nvml() -> dict[str, Any]:
    import pynvml

    pynvml.nvmlInit()
    cuda, handles = pynvml.nvmlSystemGetCudaDriverVersion_v2(), []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))
    return {
        "source": "NVML",
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "driver_cuda": _cuda_version(cuda),
        "gpus": [
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "compute_capability": "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            }
            for handle in handles
        ],
    }


def _gpus_of_driver() -> dict[str, Any]:
    from cuda.bindings import driver

    def ask(function: Any, *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {status.name}")
        return values[0] if values else None

    ask(driver.cuInit, 0)
    attribute, found = driver.CUdevice_attribute, []
    for index in range(ask(driver.cuDeviceGetCount)):
        device = ask(driver.cuDeviceGet, index)
        major = ask(driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = ask(driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        found.append(
            {
                "name": ask(driver.cuDeviceGetName, 100, device).rstrip(b"\0").decode(),
                "compute_capability": f"{major}.{minor}",
                "memory_bytes": int(ask(driver.cuDeviceTotalMem, device)),
            }
        )
    version = _cuda_version(ask(driver.cuDriverGetVersion))
    return {"source": "CUDA driver", "driver": None, "driver_cuda": version, "gpus": found}


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def devices() -> dict[str, Any]:
    """The devices that CUDA_VISIBLE_DEVICES leaves to this process, and `peer_access[i][j]`: can i reach j's memory."""
    from cupy.cuda import runtime

    found = range(runtime.getDeviceCount())
    properties = [runtime.getDeviceProperties(i) for i in found]
    return {
        "devices": [
            {"compute_capability": f"{gpu['major']}.{gpu['minor']}", "num_sms": gpu["multiProcessorCount"]}
            for gpu in properties
        ],
        "peer_access": [[i == j or bool(runtime.deviceCanAccessPeer(i, j)) for j in found] for i in found],
    }


def choices() -> dict[str, Any]:
    """How kernels would move rows of a multiple of 16 bytes on each device, and the SMs of one rank on each."""
    from cupyep.backends.cuda import plan
    from cupyep.backends.cuda.devices import default_budget, machine

    found, requested = devices()["devices"], env.mover()
    return {
        "movers": [plan.mover_of(16, requested, int(gpu["compute_capability"].replace(".", ""))) for gpu in found],
        "num_sms": [default_budget(gpu["num_sms"], machine(i), max(2, len(found)), 1) for i, gpu in enumerate(found)],
        "num_sms_rule": "min(model, SMs / ranks on the device / 2)",
    }


def ipc() -> dict[str, Any]:
    """CUDA IPC as a ring: a second process copies each device's block to the next device and writes an answer back."""
    from cupy.cuda import runtime

    blocks, handles = [], []
    for device in range(runtime.getDeviceCount()):
        runtime.setDevice(device)
        blocks.append(runtime.malloc(_BLOCK_BYTES))
        runtime.memset(blocks[-1], _OWNER_MARK + device, _BLOCK_BYTES)
        runtime.deviceSynchronize()
        handles.append(runtime.ipcGetMemHandle(blocks[-1]).hex())
    command = [sys.executable, "-c", "from cupyep.backends.cuda import probe; probe.ipc_reader()", *handles]
    reader = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if reader.returncode != 0:
        raise RuntimeError((reader.stderr.strip().splitlines() or ["the second process died"])[-1])
    for device, block in enumerate(blocks):
        runtime.setDevice(device)
        _expect(block, _READER_MARK + device, f"device {device} after the second process wrote to it")
        runtime.free(block)
    return {"self_test": f"{len(blocks)} device(s), two processes: ok"}


def ipc_reader() -> None:
    """The second process of `ipc`; the command line holds the handles in device order."""
    from cupy.cuda import runtime

    handles = sys.argv[1:]
    for source, handle in enumerate(handles):
        device = (source + 1) % len(handles)
        runtime.setDevice(device)
        local = runtime.malloc(_BLOCK_BYTES)
        remote = runtime.ipcOpenMemHandle(bytes.fromhex(handle))  # enables peer access where it is another device
        runtime.memcpy(local, remote, _BLOCK_BYTES, runtime.memcpyDeviceToDevice)
        _expect(local, _OWNER_MARK + source, f"device {device} reading device {source}")
        runtime.memset(local, _READER_MARK + source, _BLOCK_BYTES)
        runtime.memcpy(remote, local, _BLOCK_BYTES, runtime.memcpyDeviceToDevice)
        runtime.deviceSynchronize()
        runtime.ipcCloseMemHandle(remote)
        runtime.free(local)


def _expect(address: int, value: int, what: str) -> None:
    from cupy.cuda import runtime

    host = np.empty(_BLOCK_BYTES, np.uint8)
    runtime.memcpy(host.ctypes.data, address, _BLOCK_BYTES, runtime.memcpyDeviceToHost)
    if (host != value).any():
        raise RuntimeError(f"{what}: expected {value} in every byte, got {np.unique(host)[:8].tolist()}")


def mps() -> dict[str, Any]:
    """Whether the Multi-Process Service runs here. Without it, processes that share a GPU take turns: correct, slow."""
    control, tool = env.mps_pipe_dir() / "control", shutil.which("nvidia-cuda-mps-control")
    if not control.exists():
        return {"state": "off", "why": f"no {control}"}
    if tool is None:  # a container may share the daemon's folder and lack the tool
        return {"state": "on", "why": f"there is {control}"}
    asked = subprocess.run([tool], input="get_server_list\n", capture_output=True, text=True, timeout=5)
    if asked.returncode != 0 or "cannot find" in (asked.stdout + asked.stderr).lower():
        return {"state": "off", "why": f"no daemon answers at {control}"}
    return {"state": "on"}
