"""What a user writes, and the tasks that ship.

`datasets` reads rows, `prompts` makes prompts of them and streams them, `verifiers/` judge texts, `scoring` makes one
score of a task's verifiers, and `imports` finds user code by the names a config gives, which `source`
gives functions of scripts and notebooks.
"""
