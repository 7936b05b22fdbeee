"""Runs and rewards episodes: workflows on the policy, verifiers in killable processes.

`worker` runs the workflow of each trajectory (`workflows/`); `episode` is one trajectory, with its retries; `router`
chooses the engine; `response_check` validates every answer of an engine; `tool_calls` reads and describes tools;
`endpoint` speaks the OpenAI API in front of an engine, with `endpoint_requests` as its wire and `endpoint_serve` as
the plain server; `reward_pool` runs verifiers in child processes (`reward_process`) with deadlines; `evaluate` measures
held-out accuracy through the same workers.
"""
