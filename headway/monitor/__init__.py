"""Everything that is displayed, read from the record only.

`view` is the terminal during a run, `metrics` the numbers for other tools, `report` the summary and `plot` its picture;
`scaling` estimates what one engine more or fewer would change. `viewer/` shows runs in a browser.
"""
