"""Runs the project's CUDA kernels on the CPU, from the PTX that NVRTC emits, under an adversarial scheduler."""
