"""A text generator whose prefill and decode are in different processes, split by tensors and by stages."""
