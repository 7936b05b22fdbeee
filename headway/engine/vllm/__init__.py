"""The vLLM engine: requests as submissions to a vLLM server, through its public endpoints.

`engine` implements the protocol; `sequence` is one completion over several submissions; `connection` checks and watches
one server, `process` starts one as a child; `client` speaks HTTP with the messages of `messages`; `model_copy` is the
model directory the server reads its weights from.
"""
