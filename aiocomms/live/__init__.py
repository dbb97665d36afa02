"""Live groups, whose collectives complete even if ranks are dead or late.

The ranks communicate through memory that stays valid when a rank dies.
"""
