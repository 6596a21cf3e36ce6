"""Measurements of the operations against a device copy of the same bytes, XLA and the Triton kernels of `torch_ref`."""
