"""Why something failed or hangs: the flight recorder, its files, the hang report, the post mortem, the leak guard."""
