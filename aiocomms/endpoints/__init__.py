"""Endpoints: two processes that communicate without ranks, each by an address that the other has been given."""
