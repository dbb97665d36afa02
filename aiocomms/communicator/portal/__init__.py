"""Portals: a communicator's operations for threads other than that of its event loop. A thread can wait for each op.

A thread makes the record of an op, checks the record, and puts it into a queue (``door``). The loop starts the queued
ops in order, many in one turn, each in the context variables of the calling thread. When an op ends, the loop's thread
wakes each waiting thread by a *bell*, which is a lock or a callback (``works``).

No bell rings if the loop has ended or is blocked. So each waiting thread looks every
:data:`~aiocomms.communicator.portal.pending.LOOK` seconds, and ends a work that the loop cannot end.
"""
