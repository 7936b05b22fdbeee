"""Pure functions that do not know where the data came from, put together by `algorithm` as the config says.

`advantages` and `credit` turn rewards into advantages of tokens, `losses` and `corrections` log-probs into a loss;
`segments` are the sequences of a micro-batch.
"""
