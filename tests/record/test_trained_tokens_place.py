"""What a step's loss saw of each token lies in the record, and the event of the step names where."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from recorded import RecordedRun

from headway.errors import HeadwayError
from headway.record.events import Place, Trained
from headway.record.log import EVENTS_NAME, scan
from headway.record.shards import RECORD_NAME, Record, RunLog
from headway.trained_tokens import TrainedTokens


def test_a_step_names_the_tokens_it_trained_and_damage_to_them_is_refused(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.step()
    run.end()
    (step,) = (event for event in scan(tmp_path / EVENTS_NAME) if isinstance(event, Trained))
    record = Record(tmp_path / RECORD_NAME)
    assert step.tokens_at is not None
    tokens = record.load_tokens(step.tokens_at)
    assert tokens.sources.reshape(-1, 3)[:, 0].tolist() == [group for group in step.groups for _ in range(4)]
    shard = tmp_path / RECORD_NAME / step.tokens_at.shard
    data = bytearray(shard.read_bytes())
    data[step.tokens_at.offset + 20] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(HeadwayError, match="damaged"):
        record.load_tokens(step.tokens_at)


def test_the_log_places_tokens_before_the_event_that_names_them(tmp_path: Path) -> None:
    row = np.ones(2, np.float32)
    tokens = TrainedTokens(np.array([7, 0, 0], np.int32), np.array([2], np.int32), row, row, row, row, row.astype("i4"))
    log = RunLog(tmp_path)
    place = log.record.append(tokens)
    log.close()
    assert isinstance(place, Place)
    found = Record(tmp_path / RECORD_NAME).load_tokens(place)
    assert found.place(7, 0, 0) == slice(0, 2) and found.weights.tolist() == [1, 1]


@pytest.mark.parametrize("shard", ["../groups-00000.bin", "/etc/passwd", "a/../../groups-00000.bin", ".."])
def test_a_log_that_names_a_place_outside_the_record_is_refused_before_it_is_read(tmp_path: Path, shard: str) -> None:
    run = RecordedRun(tmp_path)
    run.step()
    run.end()
    (tmp_path / RECORD_NAME / "groups-00000.bin").rename(tmp_path / "groups-00000.bin")
    (step,) = (event for event in scan(tmp_path / EVENTS_NAME) if isinstance(event, Trained))
    assert step.tokens_at is not None
    with pytest.raises(HeadwayError, match=r"outside|cannot read"):
        Record(tmp_path / RECORD_NAME).load_tokens(msgspec.structs.replace(step.tokens_at, shard=shard))
