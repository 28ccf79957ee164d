"""Data sets are read and refused, and answers scored, each by its rule; what hangs or attacks is ended and counted by name."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from decimal import Decimal
from itertools import islice
from pathlib import Path

import pytest

from bench.evaluation import sandbox, workers
from bench.evaluation.errors import DataSetError
from bench.evaluation.records import Key, ScoreRecord
from bench.evaluation.sandbox import Limits, run_program
from bench.evaluation.scoring import Outcome, Score, aime_answer, boxed, gsm8k_answer, number, program, score, with_tests
from bench.evaluation.tasks import CodeTest, Rule, Task, load
from demo.problems import problems

SHARED = Path(__file__).parents[3] / "shared" / "data"
"""AIME's problems may not be copied; they lie beside a checkout where somebody has put them."""
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets are not there")
QUICK = Limits(max_seconds=1.0, max_idle_seconds=4.0)


# Data sets ---------------------------------------------------------------------------------------------------------


def test_the_shipped_sets_are_whole() -> None:
    gsm8k, humaneval = load("gsm8k"), load("humaneval")

    assert (len(gsm8k.tasks), gsm8k.rule) == (1319, Rule.GSM8K)
    assert gsm8k.tasks[0].answer == "18" and gsm8k.tasks[0].question.endswith("within \\boxed{}.")
    assert all(Decimal(task.answer) == int(task.answer) for task in gsm8k.tasks)
    assert (len(humaneval.tasks), humaneval.rule) == (164, Rule.CODE)
    assert humaneval.tasks[0].id == "HumanEval/0" and humaneval.tasks[0].code is not None
    assert humaneval.checker is None


def test_generated_sets_are_seeded_and_sliced() -> None:
    whole, part = load("demo", seed=3, end=12), load("demo", seed=3, start=5, end=12)

    assert part.tasks == whole.tasks[5:] and [task.id for task in part.tasks] == [str(number) for number in range(5, 12)]
    assert [task.question for task in whole.tasks] == [one.question for one in islice(problems(3, "test"), 12)]
    assert load("demo", seed=4, end=12).fingerprint != whole.fingerprint == load("demo", seed=3, end=12).fingerprint
    assert len(load("second", start=7).tasks) == 100
    assert whole.checker is not None and whole.checker("We are done.", "<think>\nWe are done.")


@needs_shared
def test_aime_is_read_from_a_given_folder() -> None:
    data = load("aime24", data_dir=SHARED)

    assert (len(data.tasks), data.rule) == (30, Rule.AIME)
    assert data.tasks[0].id == "60" and any(task.answer == "025" for task in data.tasks)


def test_an_absent_set_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(DataSetError, match=r"no file aime-2024.jsonl for aime24 \(not in .*\): .* problem and answer"):
        load("aime24", data_dir=tmp_path)
    with pytest.raises(DataSetError, match="no data set 'gsm9k': there are demo, second, gsm8k, aime24, humaneval"):
        load("gsm9k")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "no problems in it"),
        ("\n\n", "no problems in it"),
        ('{"question": "a", "answer": "1"}\n{"question":', "line 2: not JSON"),
        ('["a"]', "line 1: not a JSON object"),
        ('{"query": "a", "answer": "1"}', "line 1: no field question or problem; it has query, answer"),
        ('{"question": "a"}', "line 1: no field answer; it has question"),
        ('{"question": " ", "answer": "1"}', "line 1, field question: empty"),
        ('{"question": "a", "answer": ["1"]}', "line 1, field answer: list instead of text"),
        ('{"id": 1, "question": "a", "answer": 1}\n{"id": 1, "question": "b", "answer": 2}', "two problems are called '1'"),
        ('{"prompt": "def f(x):", "entry_point": "g", "test": "t"}', "line 1, field prompt: it does not begin .* 'g'"),
        ('{"prompt": "def f(x):", "entry_point": "f"}', "line 1: no field test"),
    ],
)
def test_a_bad_file_is_refused_with_file_line_and_field(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(lines)

    with pytest.raises(DataSetError, match=f"{path}.*{message}"):
        load(str(path))


def test_a_file_of_ones_own_may_be_gzipped_and_name_its_problems(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"problem": "1+1?", "answer": 2, "id": "one"}\n\n{"question": "?", "answer": "x"}\n'))

    data = load(str(path), instruction=" Box it.")

    assert (data.name, data.rule) == ("mine", Rule.MATH)
    assert data.tasks == (Task("one", "1+1? Box it.", "2"), Task("3", "? Box it.", "x"))


def test_other_bad_ranges_and_files(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"question": "a", "answer": "1"}\n' * 100)[:-20])
    (tmp_path / "bad.jsonl").write_bytes(b'{"question": "\xff", "answer": "1"}\n')
    (tmp_path / "gsm8k-test.jsonl").write_text('{"question": "a", "answer": "some"}\n')
    for name in ("cut.jsonl.gz", "bad.jsonl"):
        with pytest.raises(DataSetError, match=f"cannot read .*{name}"):
            load(str(tmp_path / name))
    with pytest.raises(DataSetError, match="line 1, field answer: no number behind ####"):
        load("gsm8k", data_dir=tmp_path)
    with pytest.raises(DataSetError, match="problem 2000 was asked for, and it has 1319"):
        load("gsm8k", start=2000)
    with pytest.raises(DataSetError, match="start must be at least 0 and below end"):
        load("demo", start=5, end=5)


# Rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{1} and \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{12} then \\boxed{13", "12"),
        ("\\boxed {a{b}c }", "a{b}c"),
        ("nothing", None),
    ],
)
def test_the_last_closed_box_counts(text: str, found: str | None) -> None:
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,200", "1200"),
        ("\\$1,200.50", "1200.5"),
        ("12\\text{ apples}", "12"),
        ("-3", "-3"),
        ("70\\%", "70"),
        ("1{,}000", "1000"),
        ("15,\\!625", "15625"),
        ("1\\,200", "1200"),
        ("\\text{18}", "18"),
        ("\\textbf{18}", "18"),
        ("\\mathbf{18}\\text{ dollars}", "18"),
        ("12\\text{ apples for 3}", "12"),
        ("\\$18/day", "18"),
        ("36\\text{ ft}^2", "36"),
        ("36 \\mathrm{cm}^{3}", "36"),
        ("18^\\circ", "18"),
        ("18^{\\circ}", "18"),
        ("18\\textit{ dollars}", "18"),
        ("18\\operatorname{cm}", "18"),
    ],
)
def test_one_number_is_read(text: str, value: str) -> None:
    assert number(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "3 or 4", "\\frac{1}{2}", "1/2", "x / 2", "2^3", "x"])
def test_no_or_several_numbers_are_none(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>\nso 5\n</think>\n\nThe answer is \\boxed{18}.", "18"),
        ("16 - 3 = 13\n#### 1,018", "1018"),
        ("</think> She makes $18.00 every day.", "18"),
        ("<think> \\boxed{7} </think> done", "7"),
        ("<think>\\boxed{7}? No, 8.</think>The answer is 8.", "8"),
        ("<think>\\boxed{18}</think>She makes 18 dollars in 9 days.", "18"),
        ("#### Final Answer\nThe answer is 18.", "18"),
        ("#### 2 steps later\n#### $18.\nThat took 3 steps.", "18"),
        ("She has 1\\,200 of them.", "1200"),
        ("no number at all", None),
        ("\\boxed{many} 3", None),
    ],
)
def test_gsm8k_answers(text: str, value: str | None) -> None:
    assert gsm8k_answer(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\\boxed{025}", 25),
        ("\\boxed{ 7 }", 7),
        ("\\boxed{$204$}", 204),
        ("\\boxed{\\text{204}}", 204),
        ("\\boxed{\\mathbf{204}.}", 204),
        ("\\boxed{1000}", None),
        ("204", None),
        ("\\boxed{3.5}", None),
        ("<think>\\boxed{7}</think> done", 7),
        ("<think>\\boxed{025}</think> It is 25.", 25),
        ("<think>\\boxed{7}? No, 8.</think>The answer is 8.", None),
    ],
)
def test_aime_answers(text: str, value: int | None) -> None:
    assert aime_answer(text) == value


def test_right_wrong_and_no_answer_are_told_apart() -> None:
    task = Task("1", "?", "025")
    assert [score(Rule.AIME, task, text) for text in ("\\boxed{25}", "\\boxed{26}", "?")] == [
        Score(Outcome.RIGHT, "25"),
        Score(Outcome.WRONG, "26"),
        Score(Outcome.NO_ANSWER),
    ]
    assert [Score(outcome).correct for outcome in Outcome] == [True, False, False, None]
    assert score(Rule.MATH, task, "\\boxed{25}") is None and score(Rule.CODE, task, "") is None
    for one in islice(problems(1, "test"), 5):
        assert score(Rule.BOXED, Task("1", one.question, one.answer), one.completion) == Score(Outcome.RIGHT, one.answer)


def test_a_box_that_the_answer_takes_back_does_not_count() -> None:
    text = "<think>\\boxed{7}? No, 8.</think>The answer is 8."

    assert score(Rule.BOXED, Task("1", "?", "7"), text) == Score(Outcome.NO_ANSWER)
    assert score(Rule.BOXED, Task("1", "?", "7"), "<think>\\boxed{7}</think>Done.") == Score(Outcome.RIGHT, "7")


def test_every_gold_answer_of_gsm8k_is_right_by_its_own_rule() -> None:
    for task in load("gsm8k").tasks:
        for text in (f"#### {task.answer}", f"\\boxed{{{int(task.answer):,}}}"):
            found = score(Rule.GSM8K, task, text)
            assert found is not None and found.outcome is Outcome.RIGHT, (task.id, text)


# math-verify -------------------------------------------------------------------------------------------------------


def hang(answer: str, text: str) -> Score:
    """A scorer for the tests, found by name in another process."""
    if text == "hang":
        time.sleep(600)
    if text == "die":
        time.sleep(0.5)  # a process that dies before its scorer is known to have begun is taken for one that hangs
        os._exit(7)
    if text == "raise":
        raise ValueError("no")
    return Score(Outcome.RIGHT if answer == text else Outcome.WRONG)


def nothing() -> None:
    """No preparation."""


def test_a_scorer_that_hangs_dies_or_raises_harms_no_other_answer() -> None:
    jobs = [(number, "a", text) for number, text in enumerate(("a", "hang", "die", "raise", "b", "a"))]

    found = dict(workers.score_all(jobs, num_workers=2, timeout_s=5.0, scorer=hang, prepared=nothing))

    assert [found[number].outcome for number in (0, 4, 5)] == [Outcome.RIGHT, Outcome.WRONG, Outcome.RIGHT]
    assert [found[number].outcome for number in (1, 2, 3)] == [Outcome.UNSCORED] * 3
    assert found[1].note == "the scorer had not ended after 5 s and was killed"
    assert found[2].note == "the scorer's process died with status 7"
    assert found[3].note == "the scorer failed: ValueError: no"


def test_math_verify_compares_by_value() -> None:
    cases = [
        ("\\frac{1}{2}", "so \\boxed{0.5}", Outcome.RIGHT),
        ("\\frac{1}{2}", "so \\boxed{\\dfrac{2}{4}}", Outcome.RIGHT),
        ("(1, 2)", "\\boxed{(1,2)}", Outcome.RIGHT),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", Outcome.RIGHT),
        ("\\frac{1}{2}", "so \\boxed{\\frac{1}{3}}", Outcome.WRONG),
        ("2", "<think> 3 </think> The answer is 2", Outcome.RIGHT),
        ("8", "<think>\\boxed{7}? No, 8.</think>The answer is 8.", Outcome.RIGHT),
        ("2", "", Outcome.NO_ANSWER),
    ]
    found = workers.score_all([(place, gold, text) for place, (gold, text, _) in enumerate(cases)], timeout_s=120.0)

    for place, one in found:
        assert one.outcome is cases[place][2], (cases[place], one)


def test_math_verify_is_ended_where_it_would_compute_for_ever() -> None:
    ((_, found),) = workers.score_all([(1, "10", "\\boxed{9^{9^{9^{9}}}+1}")], num_workers=1, timeout_s=2.0)

    assert found.outcome is Outcome.UNSCORED and "was killed" in found.note


# Programs ----------------------------------------------------------------------------------------------------------

CODE = CodeTest('import math\n\n\ndef twice(x):\n    """Twice x."""\n', "twice", "def check(f):\n    assert f(2) == 4\n")


@pytest.mark.parametrize(
    "text",
    [
        "```python\ndef twice(x):\n    return math.floor(2 * x)\n```",
        "<think>\n```python\ndef twice(x): return 0\n```\n</think>\nHere:\n```\n    return 2 * x\n```",
        "    return 2 * x\n",
        "```python\ndef twice(x):\n    return x\n```\nNo:\n"
        "```python\ndef helper(x):\n    return 2 * x\n\ndef twice(x):\n    return helper(x)\n```",
        "```python\ndef twice(x):\n    return 2 * x\n```\nUsage:\n```python\nprint(twice(2))\n```\nOutput:\n```\n4\n```",
        "```python\nfrom __future__ import annotations\n\ndef twice(x: int) -> int:\n    return 2 * x\n```",
        "1. Double it:\n\n   ```python\n   def twice(x):\n       return 2 * x\n   ```\n",
    ],
)  # fmt: skip
def test_a_program_is_the_last_block_or_the_body(text: str) -> None:
    compile(program(CODE, text), "program", "exec")
    assert run_program(with_tests(CODE, text)).passed


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os\nwhile True:\n    os.fork()", "BlockingIOError"),
        ("import subprocess\nsubprocess.run(['true'])", "BlockingIOError"),
        ("import threading\nthreading.Thread(target=print).start()", "can't start new thread"),
        ("while True: pass", "used up its 1 s of CPU"),
        ("import time\ntime.sleep(600)", "had not ended after 5 s and was killed"),
        ("import os, time\nos.setsid()\ntime.sleep(600)", "had not ended after 5 s and was killed"),
        ("hold = [0] * 10**10", "MemoryError"),
        ("open('big', 'w').write('x' * 10**8)", "File too large"),
        ("files = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "ended before its tests did"),
        ("import numpy", "No module named 'numpy'"),
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def (", "SyntaxError"),
        ("print('passed')\nraise KeyError('x')", "KeyError"),
    ],
)
def test_a_program_that_attacks_or_fails_does_not_pass(source: str, reason: str) -> None:
    waits = "sleep" in source
    found = run_program(source, QUICK if waits else Limits(max_seconds=1.0, max_idle_seconds=120.0))

    assert not found.passed and found.held is not None
    assert reason in found.reason


def test_a_program_is_kept_from_the_network_other_processes_and_files() -> None:
    held = run_program("pass").held
    if held is None or not {"network", "processes", "files"} <= set(held):
        pytest.skip(f"the system permits no namespaces: {held}")
    mark = Path(tempfile.gettempdir()) / f"lookahead-mark-{os.getpid()}"  # in a folder where anybody may write
    connect = "import socket\nsocket.create_connection(('127.0.0.1', 1), 1)"

    patient = Limits(max_seconds=1.0, max_idle_seconds=120.0)
    assert "Network is unreachable" in run_program(connect, patient).reason
    assert "No such process" in run_program("import os\nos.kill(-1, 9)", patient).reason
    assert run_program("import os\nassert os.listdir('/proc') == []", patient).passed
    assert "Read-only file system" in run_program(f"open({str(mark)!r}, 'w')", patient).reason
    assert run_program("open('mine', 'w').write('x')", patient).passed
    assert "AssertionError" in run_program("import ctypes\nassert ctypes.CDLL(None).unshare(0x20000) == 0", patient).reason
    assert not mark.exists()


def test_a_score_says_what_the_program_was_kept_from() -> None:
    ((_, found),) = sandbox.score_all([(1, "pass")])

    assert found.held == run_program("pass").held is not None
    assert ScoreRecord.of(Key("1", "ar", 0), found).held == found.held


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    run_program("import time\nopen('x', 'w').write('x')\ntime.sleep(600)", QUICK)

    assert list(tmp_path.iterdir()) == []


def test_a_sandbox_that_does_not_start_is_not_the_programs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CHILD", Path("/nowhere/child.py"))

    ((_, found),) = sandbox.score_all([(1, "pass")])

    assert found == Score(Outcome.UNSCORED, note="the sandbox did not start")


def canonical() -> list[tuple[str, str]]:
    """(id, program with tests) of the canonical solutions."""
    data = load("humaneval")
    path = Path(data.source)
    with gzip.open(path, "rt") as file:
        golds = {row["task_id"]: row["canonical_solution"] for row in map(json.loads, file)}
    found = []
    for task in data.tasks:
        assert task.code is not None
        found.append((task.id, with_tests(task.code, f"```python\n{task.code.prompt}{golds[task.id]}```")))
    return found


def test_wrong_solutions_fail() -> None:
    programs = [(task.id, with_tests(task.code, "    return 'wrong'\n")) for task in load("humaneval").tasks[::8] if task.code]
    for name, found in sandbox.score_all(programs):
        assert found.outcome is Outcome.WRONG, (name, found)


def test_all_canonical_solutions_pass() -> None:
    failed = [(name, found) for name, found in sandbox.score_all(canonical()) if found.outcome is not Outcome.RIGHT]

    assert failed == []
