"""The web viewer: `headway view RUN …` serves a page on loopback that reads runs from their record.

`command` is `headway view`; `server` is the HTTP side, with the token; `queries` answers what the page asks; `index`
folds a run's log into columns and follows it; `metrics` are the curves, `questions` the one-click tables, `tokens` one
trajectory token by token and `texts` their text. The page itself is in `assets/`: plain modules, without a build step;
uPlot draws the curves.
"""
