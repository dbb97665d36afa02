"""How ranks find each other and choose transports: launchers, stores, the registry, rendezvous, recovery."""
