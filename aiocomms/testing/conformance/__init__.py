"""The conformance suite: what every transport must do, as tests that need nothing but the transport's name.

::

    pytest --pyargs aiocomms.testing.conformance --transport=NAME

Each check is a coroutine function that every rank of a world runs, on the numbers of ranks that can decide something.
The ranks share one process if the transport can do that (:attr:`~aiocomms.transport.Capabilities.in_process`) and its
name is not followed by ``@processes``; otherwise each is a process. Where events must happen in a known order, the
ranks tell each other by a channel beside the transport (:meth:`~aiocomms.testing.conformance.case.Case.tell`).

A check runs where it can find something, which its marks say; with ``--full`` it runs everywhere:

==========  ========================================================================================================
mark        the check runs
==========  ========================================================================================================
(none)      on every transport that is named, on the first loop
``loops``   on every loop, for it exercises what differs between them
``core``    on the first transport, and on each that has native shortcuts, for the core decides it
``memory``  on ``NAME@processes`` beside ``NAME``, too, where no other check runs again
==========  ========================================================================================================

Two more marks change nothing: of checks that wait for a real clock (``clock``), and of those whose ranks connect by the
network beside their transport (``network``).

==============  ==================================================================================================
module          content
==============  ==================================================================================================
``test_*``      the checks
``trials``      every collective, with data to send and the result that is expected
``data``        random tensors, guarded memory, and reductions by plain torch
``case``        what a check is given beside its communicator
``rank``        how one rank runs a check
``tasks``       worlds whose ranks are tasks of one loop
``processes``   worlds whose ranks are processes
``leaks``       threads and descriptors that a check has left behind
``matrix``      the places in which a check runs
``options``     the options: ``--transport --full --ranks --loops --device --deadline --seed``
==============  ==================================================================================================
"""
