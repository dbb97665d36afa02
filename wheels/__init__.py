"""How the distributions become wheels (``make wheels``), and what is tried with them (``make test-wheels``)."""
