"""The conformance suite, which tests the rules that every transport must keep.

The tests need only the transport's name.

::

    pytest --pyargs aiocomms.testing.conformance --transport=NAME

Each check is a coroutine function that every rank runs. A check runs with the numbers of ranks that can change its
result. The ranks share one process if the transport supports this
(:attr:`~aiocomms.transport.Capabilities.in_process`). If the transport does not support one process, or if its name
ends in ``@processes``, each rank is a separate process. If a check needs a known order of events, the ranks send notes
to each other. The notes do not use the transport that is tested (:meth:`~aiocomms.testing.conformance.case.Case.tell`).

By default, a check runs only on those transports and loops on which it can find a fault. The marks of a check select
these transports and loops. With ``--full``, each check runs on all transports and loops:

==========  ========================================================================================================
mark        the check runs
==========  ========================================================================================================
(none)      on every chosen transport, on the first loop
``loops``   on every loop, because the check depends on the loop
``core``    on the first transport, and on each transport whose native code replaces parts of the library's core
``memory``  on both ``NAME`` and ``NAME@processes``, if both are chosen. Other checks then run on ``NAME`` only
==========  ========================================================================================================

Two more marks do not change where a check runs. ``clock`` marks checks that wait for a real clock. ``network`` marks
checks that open endpoints, which use the network with every transport.

==============  ==================================================================================================
module          content
==============  ==================================================================================================
``test_*``      the checks
``trials``      every collective, with data to send and the expected result
``data``        random tensors, guarded memory, and reductions by plain torch
``case``        the object that a check gets besides its communicator
``rank``        how one rank runs a check
``tasks``       worlds whose ranks are tasks of one loop
``processes``   worlds whose ranks are processes
``leaks``       threads and descriptors that a check has left behind
``matrix``      the places in which a check runs
``options``     the options: ``--transport --full --ranks --loops --device --deadline --seed``
==============  ==================================================================================================
"""
