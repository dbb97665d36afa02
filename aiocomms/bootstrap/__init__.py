"""The rooms where a rank is found and transports are chosen: launchers, stores, registry, rendezvous, recovery."""
