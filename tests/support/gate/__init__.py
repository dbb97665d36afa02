"""The gate: pytest plug-ins that decide whether a run of the tests is red.

==============  ==================================================================================================
module          content
==============  ==================================================================================================
``kinds``       the marks ``deterministic`` and ``real``, and what raises in a deterministic test
``sample``      which parameters of a real test a tier runs
``leaks``       no test leaves a file open
``retry``       a real test that fails is run again, alone, in fresh processes
``ledger``      the tests that failed once and passed then: ``tests/flaky.jsonl``
``schedule``    which worker runs what: long groups of tests first
``budget``      the CPU seconds of a tier, its slowest tests, and how many real tests it may have
==============  ==================================================================================================

``--tier=NAME`` switches on all but ``kinds`` and ``schedule``; CONTRIBUTING.md says what the tiers are.
"""
