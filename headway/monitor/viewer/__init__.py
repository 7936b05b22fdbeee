"""The web viewer: `headway view RUN …` serves a page on loopback that reads runs from their record.

`command` is `headway view`, `server` the HTTP side with the token, `queries` what the page asks. `opened` is one run:
`index` folds its log into columns and follows it, `texts` decodes its tokens. `metrics` are the curves, `questions`
the one-click tables, `tokens` one trajectory token by token. The page itself is in `assets/`: plain modules, without a
build step; uPlot draws the curves.
"""
