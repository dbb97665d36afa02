"""Endpoints: processes communicate pairwise without ranks, after one connects to the address of the other."""
