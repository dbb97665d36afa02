"""Live groups: collectives that end with whom they have, in memory that outlives each rank."""
