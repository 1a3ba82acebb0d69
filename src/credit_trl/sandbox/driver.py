"""Runs a program inside the sandbox. Compiled once, passed through a descriptor, never imported.

It imports nothing of this project. Descriptor 3 holds this file's code and then the request, both marshalled by the
server, which is trusted. Before the program's first line the driver writes "B" to descriptor 5, a pipe, and closes it.
A program holds no end of that pipe, so the server knows from it alone whether the program began.

The driver reports on descriptor 4, another pipe, at most one of "R" (return value, JSON), "E" (traceback) and "M"
(MemoryError), each followed by an 8-byte length and text. The program shares this process: it can write a report
itself, or take one back. It gains nothing: a report is data like standard output, and is compared outside of the
sandbox with what the program does not know.
"""

import builtins
import marshal
import os
import resource
import sys


def source_line(frame_file, number, sources):
    lines = sources.get(frame_file, "").split("\n")
    return lines[number - 1].strip()[:200] if 0 < number <= len(lines) else ""


def short_traceback(error, sources):
    """The exception and at most eight frames, with file names without directories and a shortened message."""
    try:
        message = str(error)
    except BaseException:
        message = "<the exception has no text>"
    lines = []
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code in (run.__code__, execute.__code__, call.__code__):
        trace = trace.tb_next
    while trace is not None:
        code, number = trace.tb_frame.f_code, trace.tb_lineno or 0
        line = source_line(code.co_filename, number, sources)
        name = code.co_filename.rsplit("/", 1)[-1]
        lines.append(f'  File "{name}", line {number}, in {code.co_name}' + (f"\n    {line}" if line else ""))
        trace = trace.tb_next
    if len(lines) > 8:
        lines[3:-5] = [f"  ... {len(lines) - 8} more ..."]
    if isinstance(error, SyntaxError) and error.filename in sources:
        number = error.lineno or 0
        lines.append(f'  File "{error.filename}", line {number}\n    {source_line(error.filename, number, sources)}')
        message = str(error.msg)
    if len(message) > 1000:
        message = message[:500] + " ... " + message[-495:]
    head = ["Traceback (most recent call last):"] if lines else []
    return "\n".join([*head, *lines, type(error).__name__ + (": " + message if message else "")])


def execute(prelude, source, namespace):
    for name, text in (("prelude.py", prelude), ("program.py", source)):
        exec(compile(text, name, "exec", dont_inherit=True), namespace)


def call(fn_name, arguments, namespace):
    solution = namespace.get("Solution")
    if isinstance(solution, type) and hasattr(solution, fn_name):
        return getattr(solution(), fn_name)(*arguments)
    if fn_name not in namespace:
        raise NameError(f"the program defines no function {fn_name!r}")
    return namespace[fn_name](*arguments)


def run(prelude, source, fn_name, arguments, report):
    """Execute a script or call a function of it, and report its value or error."""
    # Programs expect these builtins, which `site` would add.
    builtins.exit = builtins.quit = sys.exit
    name = "__main__" if fn_name is None else "program"
    module = type(sys)(name)
    module.__file__ = "program.py"
    sys.modules[name] = module
    process = os.getpid()
    if fn_name is not None:
        import json
    try:
        execute(prelude, source, module.__dict__)
        if fn_name is None:
            return
        value = call(fn_name, arguments, module.__dict__)
        try:
            value = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"the return value cannot be expressed as JSON: {error}") from None
        if os.getpid() == process:
            try:  # noqa: SIM105 (contextlib would be another import)
                sys.stdout.flush()
            except Exception:
                pass
            report("R", value)
        os._exit(0)
    except SystemExit:
        raise
    except MemoryError:
        module.__dict__.clear()
        report("M", "MemoryError")
        os._exit(1)
    except BaseException as error:
        if os.getpid() == process:
            report("E", short_traceback(error, {"program.py": source, "prelude.py": prelude}))
    raise SystemExit(1)


def parse_arguments(text):
    """Value of a JSON text with integers of up to 50,000 digits; programs keep Python's own limit of 4,300."""
    import json

    digits = getattr(sys, "get_int_max_str_digits", int)()
    if digits:
        sys.set_int_max_str_digits(50_000)
    try:
        return json.loads(text)
    finally:
        if digits:
            sys.set_int_max_str_digits(digits)


def main():
    with REQUEST:
        limits, prelude, source, fn_name, arguments = marshal.load(REQUEST)
    if fn_name is not None:
        arguments = parse_arguments(arguments)
    os.set_inheritable(4, False)
    sys.argv[:] = ["program.py"]
    for limit, soft, hard in limits:
        resource.setrlimit(limit, (soft, hard))
    os.write(5, b"B")
    os.close(5)
    run(prelude, source, fn_name, arguments, report)


def report(kind, text):
    payload = text.encode("utf-8", "backslashreplace")
    view = memoryview(kind.encode() + len(payload).to_bytes(8, "big") + payload)
    while view:
        view = view[os.write(4, view) :]


main()
