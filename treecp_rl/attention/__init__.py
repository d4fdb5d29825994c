"""Attention over tiles: kernels, the executor that merges their results, the transformers hook."""
