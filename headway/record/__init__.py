"""The append-only event log, the binary record of trajectories, and the folds that read them.

Only the controller writes. `events` defines every kind of event, `log` appends and reads them, `phases` announces work
that takes time and `stats` turns engine counters into differences. `shards` holds the trajectories. `ledger` folds the
log into the state that a resume starts from and the fate of every token; `history` puts the events on one clock.
"""
