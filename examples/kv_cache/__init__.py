"""Disaggregated inference: a prefill process writes KV-cache blocks into the memory of a decode process."""
