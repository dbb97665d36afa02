"""Bootstrap: ranks find each other and choose transports, by launchers, stores, registry, rendezvous and recovery."""
