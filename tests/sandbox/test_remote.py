"""The remote sandbox, against a local service in the style of Sandbox Fusion that can misbehave."""

import json
import math
import signal
import time

import pytest
from observing import CASES, PROGRAMS, check_outcome, parametrize
from service import Handler, run_code, running_service

from credit_trl.sandbox import Limits, Program, SandboxError, choose_sandbox, open_sandbox, remote
from credit_trl.sandbox.remote import RemoteSandbox, outcome_of

HANG_SECONDS = 60.0  # a handler that waits ends with its service


@pytest.fixture
def service():
    with running_service() as running:
        yield running


@pytest.fixture
def no_wait(monkeypatch):
    monkeypatch.setattr(remote, "_RETRY_SECONDS", 0.01)


def test_outcomes_of_the_table_are_those_of_a_service(service):
    with RemoteSandbox(service.url, workers=1) as sandbox:
        for row in PROGRAMS:
            if row.get("remote"):
                check_outcome(sandbox, row)


def test_remote_errors_equal_local_ones(service):
    programs = [Program(**fields) for fields in CASES["failing_programs"]]
    with open_sandbox(service.url, workers=4) as sandbox, open_sandbox("unprotected", workers=2) as local:
        assert [o.error for o in sandbox.run(programs)] == [o.error for o in local.run(programs)]


def test_remote_program_has_a_limit_of_processor_time(service):
    show = Program("import resource; print(resource.getrlimit(resource.RLIMIT_CPU))", limits=Limits(cpu_seconds=6.5))
    with RemoteSandbox(service.url) as sandbox:
        assert sandbox.run([show])[0].stdout == "(7, 8)\n"


@pytest.mark.parametrize("code", [-signal.SIGXCPU, 128 + signal.SIGXCPU, -signal.SIGKILL])
def test_remote_end_by_processor_time_is_a_time_out(code):
    run = {"status": "Finished", "return_code": code, "stdout": "", "stderr": "", "execution_time": 7.1}
    program = Program("while True: pass", limits=Limits(cpu_seconds=7))
    assert outcome_of(program, {"run_result": run}, "mark").status == "timeout"
    assert outcome_of(program, {"run_result": run | {"execution_time": 1.0}}, "mark").status == "runtime_error"


def test_request_has_the_fields_of_the_interface(service):
    with RemoteSandbox(service.url) as sandbox:
        sandbox.run([Program("pass", stdin="in", limits=Limits(wall_seconds=7, memory_bytes=1 << 30))])
    request = service.requests[-1]
    assert request["path"] == "/service/run_code"
    assert (request["language"], request["stdin"], request["run_timeout"]) == ("python", "in", 7)
    assert request["memory_limit_MB"] == 1024


def wait(handler: Handler, body: object = None) -> None:
    handler.server.closing.wait()


def drip(handler: Handler, body: dict) -> None:
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.closing.wait(0.1):
        handler.wfile.write(b" ")


def refuse(handler: Handler, body: dict) -> None:
    handler.answer(429, {})


@pytest.mark.parametrize("answer", [wait, drip, refuse])
def test_deadline_holds_however_slowly_the_service_answers(service, answer):
    service.misbehave = answer
    started = time.monotonic()
    with RemoteSandbox(service.url, workers=3) as sandbox:
        outcomes = sandbox.run([Program("print(1)")] * 8, deadline=0.5)
    assert [outcome.status for outcome in outcomes] == ["deadline"] * 8
    assert time.monotonic() - started < HANG_SECONDS


@pytest.mark.parametrize("opening", [True, False])
def test_silent_service_is_an_error_without_a_deadline(service, no_wait, monkeypatch, opening):
    monkeypatch.setattr(remote, "_ALLOWANCE_SECONDS", 0.3)
    if opening:
        monkeypatch.setattr(remote, "_OPENING_SECONDS", 0.5)
        monkeypatch.setattr(Handler, "do_POST", wait)
    service.misbehave = wait
    started = time.monotonic()
    with pytest.raises(SandboxError, match="timed out"), open_sandbox(service.url) as sandbox:
        sandbox.run([Program("print(1)", limits=Limits(wall_seconds=0.2))])
    assert time.monotonic() - started < HANG_SECONDS


@pytest.mark.parametrize("url", CASES["addresses"])
def test_invalid_address_is_refused_without_quoting_it(url):
    for action in (RemoteSandbox, open_sandbox, choose_sandbox):
        with pytest.raises(ValueError, match="http://") as caught:
            action(url)
        assert "s3" not in str(caught.value)
        assert "cret" not in str(caught.value)


@pytest.mark.parametrize(("status", "text"), [(200, '{"status": "\x1b]0;\x07"}'), (400, "\x1b[31mred\nline\u202e")])
def test_control_characters_of_a_service_are_spelled_out(service, no_wait, status, text):
    def answer(handler, body):
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(text.encode())

    service.misbehave = answer
    with RemoteSandbox(service.url) as sandbox, pytest.raises(SandboxError) as caught:
        sandbox.run([Program("print(1)")])
    assert str(caught.value).isprintable()


def test_endless_response_is_an_output_limit(service):
    def flood(handler, body):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(1000):
            handler.wfile.write(b"x" * (1 << 16))

    service.misbehave = flood
    with RemoteSandbox(service.url) as sandbox:
        [outcome] = sandbox.run([Program("print(1)", limits=Limits(output_bytes=1000))])
    assert outcome.status == "output_limit"


@parametrize("status body", "failing_answers")
def test_failing_service_is_asked_twice(service, no_wait, status, body):
    service.misbehave = lambda handler, _: handler.answer(status, json.loads(body))
    with RemoteSandbox(service.url) as sandbox, pytest.raises(SandboxError, match="could not run program 0, twice"):
        sandbox.run([Program("print(1)")])
    assert sum("print(1)" in request["code"] for request in service.requests) == 2


@pytest.mark.parametrize("failure", [429, 503, "closed connection"])
def test_failed_request_is_repeated_after_a_wait(service, monkeypatch, failure):
    asked: list[float] = []

    def restarting(handler, body):
        asked.append(time.monotonic())
        if len(asked) > 1:
            handler.answer(200, run_code(body))
        elif failure == "closed connection":
            handler.close_connection = True  # without an answer
        else:
            handler.answer(failure, {})

    service.misbehave = restarting
    monkeypatch.setattr(remote, "_RETRY_SECONDS", 0.2)
    with RemoteSandbox(service.url, workers=1) as sandbox:
        outcomes = sandbox.run([Program(f"print({n})") for n in range(3)])
    assert [outcome.stdout for outcome in outcomes] == ["0\n", "1\n", "2\n"]
    assert asked[1] - asked[0] >= 0.2


def test_report_with_wrong_mark_is_ignored():
    run = {"status": "Finished", "return_code": 0, "stdout": "", "stderr": "\nguessedRtrue"}
    outcome = outcome_of(Program("", fn_name="f"), {"status": "Success", "run_result": run}, mark="secret")
    assert outcome.status == "runtime_error"


BAD_SECONDS = (math.nan, math.inf, -1.0, 10**400, "soon", [1])


@pytest.mark.parametrize("change", [{"status": "Error"}, *({"execution_time": seconds} for seconds in BAD_SECONDS)])
def test_malformed_response_is_an_error_of_the_service(change):
    run = {"status": "Finished", "return_code": 0, "stdout": "", "stderr": "", "execution_time": 0.1}
    assert outcome_of(Program(""), {"status": "Success", "run_result": run}, mark="secret").status == "ok"
    with pytest.raises(SandboxError, match="unknown response"):
        outcome_of(Program(""), {"status": "Success", "run_result": run | change}, mark="secret")
