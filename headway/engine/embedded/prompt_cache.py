"""Prompts' keys and values, computed once per version and forked by every sequence that begins with the same prompt.

Entries are keyed by (prompt without its last token, version), so prompt KV is never forked into a sequence that starts
under a newer version. An entry has no memory of its own: it is the front of every row that holds the whole prompt.
References are counted by prompt: when the last such row is freed while sequences still need the prompt, the row is
retained, cut to the prompt, until no sequence needs it or memory is short.
"""

from collections import Counter

from headway.engine.embedded.sequence import CachedPrompt, Memory, Row, RunningSequence


class PromptCache:
    def __init__(self, memory: Memory, version: int):
        self._memory, self.version = memory, version
        self._entries: dict[tuple[bytes, int], CachedPrompt] = {}
        self._references: Counter[bytes] = Counter()  # by prompt: sequences that still need it

    def acquire(self, sequence: RunningSequence) -> None:
        """Count a waiting sequence as one that needs its prompt."""
        self._references[sequence.prefix] += 1

    def release(self, sequence: RunningSequence) -> None:
        """The sequence has its prompt, or ended without it."""
        self._references[sequence.prefix] -= 1
        if not self._references[sequence.prefix]:
            del self._references[sequence.prefix]
            entry = self._entries.get((sequence.prefix, self.version))
            if entry is not None and entry.is_retained:
                self._drop_retained(entry)

    # Rows

    def allocate(self, sequence: RunningSequence, num_tokens: int) -> bool:
        """Give a waiting sequence a row for `num_tokens`, which shares the prompt's pages if an entry has them."""
        entry = self._entries.get((sequence.prefix, self.version))
        front = entry.front if entry is not None else None
        sequence.row = self._memory.allocate(num_tokens, front, sequence.num_prompt - 1)
        if sequence.row is None:
            return False
        self._join(sequence)
        return True

    def renew(self, sequence: RunningSequence) -> bool:
        """Forget the row's contents after a swap; on False the row is empty, and the sequence is to be freed."""
        if not sequence.awaits_prompt:
            self.acquire(sequence)
        self._leave(sequence)
        entry = self._entries.get((sequence.prefix, self.version))
        has_room = self._memory.renew(sequence.row, entry.front if entry is not None else None, sequence.num_prompt - 1)
        sequence.awaits_prompt, sequence.num_cached = True, 0
        if has_room:
            self._join(sequence)
        return has_room

    def free(self, sequence: RunningSequence, is_poisoned: bool = False) -> None:
        """Give the row back, or retain it as the prompt's last; poisoned rows are cleared, and nothing in them is used.

        A sequence that still waits for its prompt releases it.
        """
        row, sequence.row, sequence.num_cached = sequence.row, None, 0
        if sequence.awaits_prompt:
            sequence.awaits_prompt = False
            self.release(sequence)
        entry = sequence.prompt
        is_last = entry is not None and entry.rows == [row] and entry.key[1] == self.version
        if entry is not None and is_last and self._references[sequence.prefix] and not is_poisoned:
            self._memory.shrink(row, entry.num_tokens)
            entry.is_retained = True
            sequence.prompt, entry.num_members = None, entry.num_members - 1
            return
        self._leave(sequence, row)
        if is_poisoned:
            self._memory.clear(row)
        self._memory.free(row)

    def _join(self, sequence: RunningSequence) -> None:
        key = sequence.prefix, self.version
        entry = self._entries.setdefault(key, CachedPrompt(key, sequence.num_prompt - 1))
        entry.num_members += 1
        sequence.prompt, sequence.awaits_prompt, sequence.num_cached = entry, True, 0
        self.advance(sequence)

    def _leave(self, sequence: RunningSequence, row: Row = None) -> None:
        entry, row = sequence.prompt, row or sequence.row
        sequence.prompt = None
        if entry is None:
            return
        entry.num_members -= 1
        if entry.computing is row:
            entry.computing = None
        elif row in entry.rows:
            entry.rows.remove(row)
        if not entry.num_members and not entry.is_retained:
            del self._entries[entry.key]

    # Computing and forking

    def advance(self, sequence: RunningSequence) -> None:
        """Fork the prompt a sequence waits for, or let the sequence compute it if no other does."""
        entry = sequence.prompt
        assert entry is not None
        if entry.rows:
            self._memory.copy(entry.rows[0], sequence.row, entry.num_tokens)
            sequence.num_cached = entry.num_tokens
            entry.rows.append(sequence.row)
        elif entry.computing is None:
            entry.computing = sequence.row
            self.computed(sequence)
        else:
            return
        sequence.awaits_prompt = False
        self.release(sequence)

    def computed(self, sequence: RunningSequence) -> None:
        """More of the sequence's keys and values are computed; publish the prompt once it is complete."""
        entry = sequence.prompt
        if entry is not None and entry.computing is sequence.row and sequence.num_cached >= entry.num_tokens:
            entry.rows.append(entry.computing)
            entry.computing = None

    # Retained prompts

    def set_version(self, version: int) -> None:
        """After a swap: free the retained prompts, which are of an older version."""
        self.version = version
        while self.release_retained():
            pass

    def release_retained(self) -> bool:
        """Free one retained prompt; False if there is none. Sequences that need it compute it again."""
        entry = next((entry for entry in self._entries.values() if entry.is_retained), None)
        if entry is not None:
            self._drop_retained(entry)
        return entry is not None

    def _drop_retained(self, entry: CachedPrompt) -> None:
        self._memory.free(entry.rows.pop(0))
        entry.is_retained = False
        if not entry.num_members:
            del self._entries[entry.key]
