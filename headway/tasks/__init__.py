"""What a user writes, and what ships: `prompts` reads rows, `imports` finds user code by the names a config gives, and
`scoring` calls verifiers and weights what they return."""
