"""Live groups: collectives that complete without dead or late ranks, through memory that outlives each rank."""
