"""Look for a GPU without any package: ``make gpu-check`` does so before it installs gigabytes."""

from __future__ import annotations

import ctypes
import sys


def why_not() -> str:
    """Return a sentence that says why nothing can be checked here; "" if there is a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "gpu-check needs an NVIDIA GPU, and this machine has no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return f"gpu-check needs an NVIDIA GPU, and the driver of this machine finds none (CUDA error {status})"
    return "" if count.value else "gpu-check needs an NVIDIA GPU, and this machine has none"


if __name__ == "__main__":
    sys.exit(why_not() or 0)
