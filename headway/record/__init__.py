"""The append-only event log and the binary record of trajectories, and the folds that read them.

Only the controller writes. `events` is the log, `shards` the trajectories; `ledger` folds the log into the state a
resume starts from and the fate of every token; `history` puts the events on one clock.
"""
