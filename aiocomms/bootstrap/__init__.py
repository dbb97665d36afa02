"""The bootstrap of ranks: launchers, stores, the rendezvous, the registry of transports, and recovery."""
