"""The toolkit for authors of transports: start here, with ``aiocomms.transport`` for what a transport is."""
