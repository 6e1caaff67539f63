"""Reading log files: tails, complaints, and following across rotation."""

from __future__ import annotations

from pathlib import Path

from services.cli.log_files import Follower, last_complaint, readable, tail


def test_the_tail_of_a_missing_file_is_empty_and_of_a_long_one_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    assert tail(path, 5) == []
    path.write_text("".join(f"line {n}\n" for n in range(100_000)))
    assert tail(path, 2) == ["line 99998", "line 99999"]
    assert tail(path, 0) == []


def test_json_records_are_made_readable_and_other_lines_left_alone() -> None:
    record = '{"event":"job_taken","level":"info","time":"12:00","request_id":"r1","service":"decode"}'
    assert readable(record) == "12:00 info    job_taken request_id=r1"
    assert readable("[1] plain text\n") == "[1] plain text"
    assert readable('{"not": "a record"}') == '{"not": "a record"}'


def test_the_complaint_is_the_last_error_else_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    assert last_complaint(path) == "it wrote nothing"
    path.write_text("Traceback ...\nValueError: no such dtype\n\n")
    assert last_complaint(path) == "ValueError: no such dtype"
    path.write_text('{"event":"a","level":"error"}\n{"event":"b","level":"info"}\n')
    assert last_complaint(path).endswith("a")
    path.write_text("Error: badly formatted\nFor help, use -h\n")
    assert last_complaint(path) == "Error: badly formatted"
    path.write_text("x" * 10_000)
    assert len(last_complaint(path)) <= 300


def test_of_a_crash_the_complaint_is_what_the_exception_said(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text(
        '{"event":"before","level":"warning"}\n'
        "  + Exception Group Traceback (most recent call last):\n"
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "x.py", line 1, in run\n'
        "    | AttributeError: 'dict' object has no attribute 'name'\n"
        "    +------------------------------------\n"
    )
    assert last_complaint(path) == "AttributeError: 'dict' object has no attribute 'name'"


def test_following_loses_no_line_when_the_file_is_rotated_or_truncated(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("before\n")
    follower = Follower(path)
    assert follower.new_lines() == []
    with path.open("a") as file:
        file.write("one\ntw")
    assert follower.new_lines() == ["one"]
    with path.open("a") as file:
        file.write("o\nlast of the old file\n")
    path.rename(tmp_path / "x.log.1")
    path.write_text("first of the new file\n")
    assert follower.new_lines() == ["two", "last of the old file", "first of the new file"]
    path.write_text("cut\n")
    assert follower.new_lines() == ["cut"]
    follower.close()


def test_following_begins_when_the_file_appears(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "later.log")
    assert follower.new_lines() == []
    (tmp_path / "later.log").write_text("hello\n")
    assert follower.new_lines() == ["hello"]
    follower.close()
