"""The verbs on CUDA devices. CuPy is imported here and in the modules beside, only when a call needs it."""
