"""The attention op and its Pallas kernels."""
