"""`losses` and `advantages`: pure functions that do not know where the data came from."""
