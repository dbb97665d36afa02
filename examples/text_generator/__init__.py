"""A text generator with prefill and decode in different processes, split by tensors and by stages."""
