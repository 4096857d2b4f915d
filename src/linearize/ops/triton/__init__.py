"""Triton kernels of the grouped quadratic operator. Importing this package does not import triton."""
