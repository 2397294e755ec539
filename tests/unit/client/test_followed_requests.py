"""Lines of requests go from a client to followers. They are bounded at every step, and checked by the receiver."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.actors.directory.followers import FOLLOW_S, KEPT, LINES_PER_ANSWER, LINES_PER_S, Followers
from raykv.client.request_record import WAITING, RequestRecord, RequestReport
from raykv.keys import CacheId
from raykv.protocol.packing import packed
from raykv.protocol.requests import LINE_BYTES, Followed, RequestLine

NAMES = {2: "a node"}
LINE = RequestRecord("request", CacheId("m", 16, 4096, b""), 64, found={"memory": 32}, read=32).line("a node")


def told(answer: Followed) -> list[int]:
    return [int(line) for line in answer.lines]


def lines(*numbers: int) -> tuple[bytes, ...]:
    return tuple(b"%d" % number for number in numbers)


def test_a_follower_gets_what_was_reported_since_and_no_other_follower_takes_it() -> None:
    followers = Followers()
    assert not followers.there(0.0)
    followers.report(lines(1), 0, 0.0)  # at this time nobody follows
    cursor = followers.follow((0, 0, 0), 5, NAMES, 10.0).cursor
    assert followers.there(10.0 + FOLLOW_S - 0.1) and not followers.there(10.0 + FOLLOW_S)
    followers.report(lines(2, 3), 4, 11.0)
    for _ in range(2):
        answer = followers.follow(cursor, 5, NAMES, 11.0)
        assert told(answer) == [2, 3] and answer.left_out == 4 and answer.names == NAMES
    again = followers.follow(answer.cursor, 5, NAMES, 11.0)
    assert not again.lines and not again.left_out
    after_takeover = followers.follow((4, 77, 3), 5, NAMES, 11.0)
    assert told(after_takeover) == [2, 3]


@given(st.lists(st.tuples(st.integers(0, 2 * LINES_PER_S), st.integers(0, 9), st.booleans()), max_size=12))
def test_what_is_left_out_is_counted(steps: list[tuple[int, int, bool]]) -> None:
    followers, now, count, reported = Followers(), 100.0, 0, 0
    cursor, seen, left_out = followers.follow((0, 0, 0), 1, NAMES, now).cursor, list[int](), 0
    for lines_there, dropped, polls in steps:
        followers.report(lines(*range(count, count + lines_there)), dropped, now)
        count, reported = count + lines_there, reported + lines_there + dropped
        assert len(followers._lines) <= KEPT
        now += 0.4
        for _ in range(3 if polls else 0):
            answer = followers.follow(cursor, 1, NAMES, now)
            assert len(answer.lines) <= LINES_PER_ANSWER
            cursor, seen, left_out = answer.cursor, seen + told(answer), left_out + answer.left_out
        followers.follow(cursor, 1, NAMES, now)  # another follower goes on
    while (answer := followers.follow(cursor, 1, NAMES, now)).lines or answer.left_out:
        cursor, seen, left_out = answer.cursor, seen + told(answer), left_out + answer.left_out
    assert seen == sorted(set(seen)) and len(seen) + left_out == reported


@pytest.mark.parametrize(
    "report", [((bytes(LINE_BYTES + 1),), 0), (("text",), 0), ((1,), 0), ((), -1), ((), "1"), (None, 0), ((), None)]
)
def test_what_is_no_report_is_refused(report: tuple[Any, Any]) -> None:
    followers = Followers()
    followers.follow((0, 0, 0), 1, NAMES, 1.0)
    with pytest.raises((ValueError, TypeError)):
        followers.report(*report, 1.0)
    assert not followers.follow((1, 0, 0), 1, NAMES, 1.0).lines


def test_a_client_sends_so_many_lines_at_a_time() -> None:
    report = RequestReport()
    assert not report.waits
    for _ in range(WAITING + 3):
        report.add(LINE)
    sent, left_out = report.take()
    assert (len(sent), left_out) == (WAITING, 3) and not report.waits and report.take() == ((), 0)
    assert RequestLine.unpacked(sent[0]) == LINE


def test_a_line_fits_and_shows_nothing_that_a_terminal_would_obey() -> None:
    line = LINE._replace(model="m\x1b[2J\n" + "é" * 10_000, short="x" * 10_000, tenant="y" * 10_000, request="é" * 9999)
    data = line.packed()
    assert len(data) <= LINE_BYTES
    assert RequestLine.unpacked(data).model.startswith("m[2Jé")


parts = st.integers(-(2**63), 2**63 - 1) | st.text(max_size=9) | st.none() | st.floats()


@given(st.binary(max_size=200) | st.lists(parts, max_size=25).map(packed))
def test_what_is_no_line_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        RequestLine.unpacked(data)
