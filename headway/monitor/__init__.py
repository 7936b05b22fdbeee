"""Everything that is displayed, read from the record only.

`view` is the terminal during a run, `metrics` the numbers for other tools (`metric_names` explains each, `samples` adds
completions), `report` the summary and `plot` its picture. `reader` is a run directory as Python sees it, `tables` its
DataFrames, `listing` prints runs in a terminal, and `export` writes models with a card, and completions.
`audit` compares trained with sampled data, `rates` computes recent rates, `scaling` estimates what one engine more or
fewer would change, and `text` makes text that is not ours safe to print. `viewer/` shows runs in a browser.
"""
